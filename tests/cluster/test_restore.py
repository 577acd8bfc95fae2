"""A batch that is stopped and goes on, again and again, on other numbers of ranks and nodes each time."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcgen.checkpoint.reader import CheckpointReader
from hpcgen.jobs.signals import INTERRUPTED
from hpcgen.report.events import read_events
from tests.caches import own_cache
from tests.cluster.launching import needs_mpi, run
from tests.model.tiny_models import save_tiny
from tests.tiny_tokenizer import save_tokenizer

pytestmark = [needs_mpi, pytest.mark.xdist_group("ranks")]
KILLED = 9
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 0.7, "top_k": 20, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"temperature": 1.0, "n": 3, "repetition_penalty": 1.2},
    {"temperature": 0.8, "structured_outputs": {"regex": "[a-z]{90,120}"}, "ignore_eos": None},
    {"temperature": 0.6, "min_p": 0.02, "logprobs": 2, "logit_bias": {"40": 3}},
)
"""What is drawn must not depend on where, nor on what came before in the job."""


def write_requests(path: Path) -> None:
    chosen = random.Random(3)
    with open(path, "w") as file:
        for index in range(4 * len(KINDS)):
            prompt = [chosen.randrange(3, 250) for _ in range(chosen.randrange(2, 150))]
            body = {"prompt": prompt, "max_tokens": 60 + 5 * index, "seed": index, "ignore_eos": True}
            body |= KINDS[index % len(KINDS)]
            request = {"custom_id": f"r{index}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(request) + "\n")


class Batch:
    """One input, and the runs of it."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.model = directory, directory / "model"
        save_tiny("qwen3_moe", self.model, torch.float32)
        save_tokenizer(self.model)
        write_requests(directory / "in.jsonl")

    def job(
        self, output: str, nodes: tuple[int, ...], fault: str = "nothing", decision: int = 1, status: int = 0
    ) -> str:
        """One job of a run, to its end or to a fault of rank 0 at some decision; what it said."""
        command = [
            sys.executable, "-m", "tests.cluster.programs.faulty_run", f"0:{decision}", fault,
            "run", "--model", str(self.model), "--input", str(self.directory / "in.jsonl"),
            "--output", str(self.directory / output), "--dtype", "float32", "--host-memory", "16MB", "--threads", "1",
            "--expert-batch", "64",
        ]  # fmt: skip
        done = run(command, nodes, HPCGEN_CACHE=own_cache(self.directory / "cache"))
        assert done.returncode == status, done.stderr
        assert "Traceback" not in done.stderr
        return done.stderr

    def results(self, output: str) -> list[tuple[str, list[str], Any]]:
        """Name, texts and usage of each request; the tokens too, where the request asks for them."""
        lines = [json.loads(line) for line in (self.directory / output).read_text().split("\n") if line]
        bodies = [(line["custom_id"], line["response"]["body"]) for line in lines]
        return [
            (name, [c["text"] + str((c["logprobs"] or {}).get("tokens")) for c in body["choices"]], body["usage"])
            for name, body in bodies
        ]

    def events(self, output: str, kind: str) -> list[dict[str, Any]]:
        path = (self.directory / output).with_suffix(".run") / "events.jsonl"
        return [event for event in read_events(path) if event["event"] == kind]


def test_a_batch_goes_on_on_other_ranks_and_nodes_with_and_without_kv_as_if_nothing_had_happened(
    tmp_path: Path,
) -> None:
    batch = Batch(tmp_path)
    batch.job("whole.jsonl", (1,))
    # Two nodes save a file each,
    batch.job("parts.jsonl", (2, 1), "term", 4, INTERRUPTED)
    checkpoint = CheckpointReader(tmp_path / "parts.run" / "checkpoints").latest()
    assert checkpoint is not None and [file.node for file in checkpoint.manifest.files] == [0, 1]
    assert all(file.sequences and file.pages for file in checkpoint.manifest.files)
    # one rank takes over both, and is killed when it has saved its tokens and some pages;
    said = batch.job("parts.jsonl", (1,), "kill in the checkpoint", 5, KILLED)
    assert f"restored {len(checkpoint.sequences)} sequences from checkpoint {checkpoint.epoch}" in said
    # the KV saved before serves what was known then, and the rest is recomputed on two nodes.
    said = batch.job("parts.jsonl", (1, 2))
    assert f"checkpoint epoch {checkpoint.epoch + 2} was not finished" in said
    (last,) = batch.events("parts.jsonl", "restored")[-1:]
    assert last["epoch"] == checkpoint.epoch + 1 and last["kv_tokens"] > 0
    assert batch.results("parts.jsonl") == batch.results("whole.jsonl")
