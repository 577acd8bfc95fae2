"""What periodic checkpoints cost, and what KV in them saves after a kill: `results/checkpoint_stall.py --model DIR`.

Each batch runs without checkpoints and with one every few seconds; then it is killed by SIGKILL in the middle and
resumed. The model of experts is a random one, on two ranks that are two nodes by name.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from hpcgen.cluster.world import NODE_NAME  # noqa: E402
from hpcgen.jobs.recovery import prefill_rate  # noqa: E402
from hpcgen.report.events import read_events  # noqa: E402
from tests.model.tiny_models import randomize  # noqa: E402
from tests.tiny_tokenizer import VOCABULARY_SIZE, save_tokenizer  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True, help="a small dense model, in bfloat16")
    parser.add_argument("--interval", type=float, default=5.0)
    parser.add_argument("--requests", type=int, default=64)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        cases = [("dense, one rank", arguments.model, 1), ("experts, two nodes", model_of_experts(work / "moe"), 2)]
        for name, model, ranks in cases:
            measure(name, model, ranks, work, arguments.interval, arguments.requests)


def model_of_experts(directory: Path) -> Path:
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY_SIZE, hidden_size=512, intermediate_size=1024, moe_intermediate_size=256,
        num_hidden_layers=12, num_attention_heads=8, num_key_value_heads=4, head_dim=64, num_experts=32,
        num_experts_per_tok=4, max_position_embeddings=2048,
    )  # fmt: skip
    randomize(AutoModelForCausalLM.from_config(config), torch.bfloat16).save_pretrained(directory)
    save_tokenizer(directory)
    return directory


def measure(name: str, model: Path, ranks: int, work: Path, interval: float, requests: int) -> None:
    source = work / "in.jsonl"
    draw = random.Random(1)
    with open(source, "w") as file:
        for index in range(requests):
            prompt = [draw.randrange(3, 250) for _ in range(draw.randrange(100, 400))]
            body = {"prompt": prompt, "max_tokens": 256, "ignore_eos": True, "seed": index}
            line = {"custom_id": f"r{index}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    seconds = {}
    for every in (0.0, interval):
        output = work / f"{ranks}-{every}.jsonl"
        job(model, ranks, source, output, every).communicate()
        found = events(output)
        steps = [event for event in found if event["event"] == "steps"]
        seconds[every] = sum(event["seconds"] for event in steps)
    saved = [event for event in found if event["event"] == "checkpoint"]
    stall = sum(event["stall"] for event in saved)
    print(
        f"{name}: {seconds[0.0]:.1f} s without checkpoints, {seconds[interval]:.1f} s with {len(saved)}, one every "
        f"{interval:g} s; waited for them {stall:.3f} s = {stall / seconds[interval]:.2%}, at most "
        f"{max(event['stall'] for event in saved):.3f} s for one, or {max(e['stall'] for e in saved) / 600:.4%} of the "
        f"default interval; at most {max(event['bytes'] for event in saved) / 1e6:.0f} MB, "
        f"{max(event['pages'] for event in saved)} pages, {max(event['pages_left_out'] for event in saved)} left out"
    )
    shutil.rmtree(output.with_suffix(".run"))
    output.unlink()
    killed = job(model, ranks, source, output, interval)
    while sum(event["event"] == "checkpoint" for event in events(output)) < 2 and killed.poll() is None:
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    job(model, ranks, source, output, 0.0).communicate()
    (restored,) = [event for event in events(output) if event["event"] == "restored"]
    rate = (prefill_rate(output.with_suffix(".run") / "events.jsonl") or 0) * ranks
    print(
        f"{name}, killed: KV of {restored['kv_tokens']:,} tokens loaded in {restored['seconds']:.2f} s; to compute it "
        f"at the {rate:,.0f} tokens/s of the prefill takes {restored['kv_tokens'] / rate:.1f} s"
    )


def job(model: Path, ranks: int, source: Path, output: Path, interval: float) -> subprocess.Popen[str]:
    line = [
        sys.executable, "-m", "hpcgen.cli", "run", "--model", str(model), "--input", str(source),
        "--output", str(output), "--host-memory", "1GB", "--checkpoint-interval", str(interval),
    ]  # fmt: skip
    if ranks > 1:
        command, line = line, [str(Path(sys.executable).with_name("mpirun"))]
        for rank in range(ranks):
            line += [":"] * bool(rank) + ["-n", "1", "-env", NODE_NAME, f"node{rank}", *command]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        line, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )


def events(output: Path) -> list[dict[str, Any]]:
    path = output.with_suffix(".run") / "events.jsonl"
    return list(read_events(path)) if path.exists() else []


if __name__ == "__main__":
    main()
