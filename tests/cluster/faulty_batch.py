"""A batch on ranks of which some fail, and what has to be true of how it ends."""

import json
import random
import sys
from contextlib import suppress
from pathlib import Path

from tests.caches import own_cache

REQUESTS = 24


class Batch:
    """A batch in a directory of its own, and the command that runs it with a fault."""

    def __init__(self, model: Path, directory: Path) -> None:
        self.output = directory / "out.jsonl"
        self.environment = {"HPCGEN_CACHE": own_cache(model.parent / "cache")}
        self._arguments = [
            "run", "--model", str(model), "--input", str(directory / "in.jsonl"), "--output", str(self.output),
            "--dtype", "float32", "--host-memory", "16MB", "--threads", "1", "--expert-batch", "64",
        ]  # fmt: skip
        chosen = random.Random(1)
        with open(directory / "in.jsonl", "w") as file:
            for index in range(REQUESTS):
                prompt = [chosen.randrange(3, 250) for _ in range(chosen.randrange(2, 90))]
                body = {"model": "m", "prompt": prompt, "max_tokens": 5 + 4 * index, "temperature": 0}
                request = {"custom_id": f"r{index}", "method": "POST", "url": "/v1/completions", "body": body}
                file.write(json.dumps(request) + "\n")

    def program(self, fault: str, decisions: dict[int, int], *more: str) -> list[str]:
        """A module and its arguments: ranks come to grief at these decisions."""
        when = ",".join(f"{rank}:{decision}" for rank, decision in decisions.items())
        return ["tests.cluster.programs.faulty_run", when, fault, *self._arguments, *more]

    def command(self, rank: int, fault: str, decision: int, *more: str) -> list[str]:
        return [sys.executable, "-m", *self.program(fault, {rank: decision}, *more)]

    def results(self) -> list[tuple[str, str]]:
        lines = map(json.loads, filter(None, self.output.read_text().split("\n")))
        return [(line["custom_id"], line["response"]["body"]["choices"][0]["text"]) for line in lines]


def mapped_names() -> set[str]:
    """Files in /dev/shm that some process has mapped."""
    inodes = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            inodes |= {int(line.split()[4]) for line in maps.read_text().splitlines() if " /dev/shm/" in line}
    return {path.name for path in Path("/dev/shm").iterdir() if path.lstat().st_ino in inodes}
