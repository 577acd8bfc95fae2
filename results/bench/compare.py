"""hpcgen and other engines on the same batches, in one sitting: a table and a picture.

    python results/bench/compare.py --model qwen3moe=DIR --model smollm2=DIR --peer-env vllm=ENV \
        --work W1:128x3 --work W2:128 --work W3:64 --growth smollm2

`ENV` is a virtual environment with the engine (see peer_vllm.py, peer_openvino.py); without one, ours runs alone.
`--work NAME:REQUESTS[xREPEATS]`; NAME@MODEL:... for one model only. Engines take turns model by model; a repeated batch
counts as its median. Writes OUTPUT.md, OUTPUT.svg and, line by line as they come, OUTPUT.jsonl, which a next call with
the same arguments goes on from.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import ours
from arguments import parse_pair
from comparison_report import write_report
from workloads import write

HERE = Path(__file__).parent
GROWTH = (10, 100, 1000, 10000)


def parse_work(text: str) -> tuple[str, str | None, int, int]:
    """'W1@qwen:128x3' -> (workload, model or None, requests, repeats)."""
    match = re.fullmatch(r"(\w+)(?:@([\w.-]+))?:(\d+)(?:x(\d+))?", text)
    if match is None:
        raise argparse.ArgumentTypeError("NAME[@MODEL]:REQUESTS[xREPEATS], as in W1:128x3")
    return match[1], match[2], int(match[3]), int(match[4] or 1)


class Sitting:
    """The batches that are to be run, and what came of those that were."""

    def __init__(self, arguments: argparse.Namespace, scratch: Path) -> None:
        self._arguments, self._scratch = arguments, scratch
        self._file = arguments.output.with_suffix(".jsonl")
        self.results = [json.loads(line) for line in self._file.open()] if self._file.exists() else []

    def requests(self, model: Path, work: str, count: int) -> Path:
        file = self._scratch / f"{model.name}-{work}-{count}.jsonl"
        return file if file.exists() else write(work, count, model, file)

    def batches(self, model: str) -> list[tuple[str, int]]:
        """(workload, requests) of one model, each as often as it is repeated; in turns, not one after the other."""
        wanted = [work for work in self._arguments.work if work[1] in (None, model)]
        most = max((repeats for *_, repeats in wanted), default=0)
        return [(work, count) for turn in range(most) for work, _, count, repeats in wanted if turn < repeats]

    def missing(self, engine: str, model: str) -> list[tuple[str, int]]:
        left = self.batches(model)
        for result in self.results:
            key = (result["work"], result["requests"])
            if result["engine"] == engine and result["model"] == model and key in left:
                left.remove(key)
        return left

    def note(self, engine: str, model: str, work: str, count: int, result: dict) -> None:
        line = {"engine": engine, "model": model, "work": work, "requests": count, **result}
        self.results.append(line)
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{model} {work}:{count} {engine}: {result['seconds']:.1f} s, others {result['others']:.0%}", flush=True)

    def run_ours(self, model: str, directory: Path) -> None:
        for work, count in self.missing("hpcgen", model):
            self.note("hpcgen", model, work, count, self._ours(directory, self.requests(directory, work, count)))

    def run_first_token(self, model: str, directory: Path) -> None:
        """From the start of the process to the first token, weights converted: a run of one request."""
        if not any(result["work"] == "first" and result["model"] == model for result in self.results):
            file = self._scratch / f"{model}-first.jsonl"
            body = json.loads(self.requests(directory, "W1", 1).read_text())
            body["body"] |= {"max_tokens": 1, "min_tokens": 1}
            file.write_text(json.dumps(body) + "\n")
            self._ours(directory, file)  # converts, where that was not done before
            self.note("hpcgen", model, "first", 1, self._ours(directory, file))

    def run_growth(self, model: str, directory: Path) -> None:
        for count in GROWTH:
            if not any(result["work"] == "short" and result["requests"] == count for result in self.results):
                requests = self.requests(directory, "short", count)
                self.note("hpcgen", model, "short", count, self._ours(directory, requests))

    def run_peer(self, engine: str, environment: Path, model: str, directory: Path) -> None:
        batches = self.missing(engine, model)
        if not batches or (engine == "openvino" and not Path(f"{directory}-openvino").exists()):
            return
        files = [self.requests(directory, work, count) for work, count in batches]
        command = [environment / "bin/python", HERE / f"peer_{engine}.py", directory, self._arguments.threads, *files]
        log = (self._scratch / f"{engine}.log").open("w")
        settings = {**os.environ, **(_preloads(environment) if engine == "vllm" else {})}
        settings.pop("PYTHONPATH", None)
        with subprocess.Popen(
            list(map(str, command)), stdout=subprocess.PIPE, stderr=log, text=True, env=settings
        ) as process:  # fmt: skip
            results = _json_lines(process)
            for (work, count), result in zip(batches, results, strict=False):
                self.note(engine, model, work, count, result)
            process.wait()
        if self.missing(engine, model):
            print(f"{engine} gave up on {model}: {(self._scratch / f'{engine}.log').read_text()[-2000:]}")

    def _ours(self, model: Path, requests: Path) -> dict:
        with tempfile.TemporaryDirectory(dir=self._scratch) as directory:
            return ours.run(model, requests, Path(directory), self._arguments.threads)


def _json_lines(process: subprocess.Popen) -> Iterator[dict]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            yield json.loads(line)


def _preloads(environment: Path) -> dict[str, str]:
    found = [
        *Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"),
        *environment.glob("lib/libiomp5.so"),
    ]
    return {"LD_PRELOAD": ":".join(map(str, found[:2]))} if found else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=parse_pair, action="append", required=True, metavar="NAME=DIR")
    parser.add_argument("--peer-env", type=parse_pair, action="append", default=[], metavar="ENGINE=DIR")
    parser.add_argument("--work", type=parse_work, action="append", default=[], metavar="NAME[@MODEL]:N[xREPEATS]")
    parser.add_argument("--growth", metavar="MODEL", help="also 10 to 10,000 short requests by hpcgen on this model")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--output", type=Path, default=HERE.parent / "peers")
    arguments = parser.parse_args()
    command = "python results/bench/compare.py " + " ".join(sys.argv[1:])
    with tempfile.TemporaryDirectory() as scratch:
        sitting = Sitting(arguments, Path(scratch))
        for model, directory in arguments.model:
            sitting.run_first_token(model, directory)
            for engine, environment in arguments.peer_env:
                sitting.run_peer(engine, environment, model, directory)
            sitting.run_ours(model, directory)
            if model == arguments.growth:
                sitting.run_growth(model, directory)
            write_report(sitting.results, command, arguments.output)


if __name__ == "__main__":
    main()
