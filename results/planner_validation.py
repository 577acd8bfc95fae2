"""Predicted against measured completion times of real batches on this machine, on 1, 2 and 4 ranks.

Two models: that of --model (a directory with weights), and a small random mixture of experts that the script makes.
Each is profiled once for each number of ranks by `hpcgen profile`, then batches that the profile did not see are run by
`hpcgen run` under mpirun, with the batch sizes that it plans or with given ones, and simulated with the costs of the
profile and the configuration that the run had. Measured is the time of all decisions of the engine, in prefill and in
decode, by the clock on the wall; loading, and the start of the tokenizer's process, are excluded. Measure on a machine
that does nothing else: what other processes took of its processors meanwhile is measured too, and a run or a profile
that was disturbed is made again when the script is started again, as long as none is better:

    python results/planner_validation.py --model DIR --work DIR             # all of it, about 12 minutes
    python results/planner_validation.py --model DIR --work DIR --seconds 280   # goes on where it was; what it has
"""

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
import transformers

from hpcgen.planner.configuration import Configuration, PhaseConfiguration, layer_bytes
from hpcgen.planner.model_shape import ModelShape
from hpcgen.planner.profile_file import Profile
from hpcgen.planner.simulator import Simulation
from hpcgen.planner.workload import Workload, draw
from hpcgen.report.events import read_events

DECISION_STEPS = 16
"""Of the engine."""
HOST_MEMORY = 1 << 30
DISTURBED = 0.06
"""Share of the processors that others may have."""


class Case(NamedTuple):
    model: str
    ranks: int
    sequences: int
    prompts: str
    outputs: str
    budget: str = ""
    """--device-memory."""
    batch: str = ""
    """--expert-batch."""


LONG_TAIL = (128, "uniform:16:256", "lognormal:40:0.8:200")
SHORT = (200, "fixed:32", "lognormal:30:1.0:256")
PREFILL = (48, "fixed:512", "fixed:16")
EQUAL = (64, "fixed:128", "fixed:64")
CASES = [
    *(Case(model, ranks, *load) for model in ("moe", "dense") for ranks in (1, 2, 4) for load in (LONG_TAIL, PREFILL)),
    *(Case("moe", ranks, *SHORT, batch="64") for ranks in (1, 2, 4)),
    *(Case("moe", ranks, *EQUAL, budget="300MiB") for ranks in (1, 2)),
    *(Case("dense", ranks, *EQUAL, budget="400MiB") for ranks in (1, 2)),
]


def mixture_of_experts(directory: Path, tokenizer_of: Path) -> Path:
    """A random Qwen3-MoE of 0.2 G parameters."""
    if directory.exists():
        return directory
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=1024, moe_intermediate_size=256, num_hidden_layers=12,
        num_attention_heads=8, num_key_value_heads=2, head_dim=64, num_experts=32, num_experts_per_tok=4,
        max_position_embeddings=4096, torch_dtype=torch.bfloat16,
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    transformers.AutoTokenizer.from_pretrained(tokenizer_of).save_pretrained(directory)
    return directory


def busy_seconds() -> float:
    """Processor time of all processes of this machine so far."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


def disturbance(begin: float, own_begin: float, wall: float) -> float:
    """Share of the machine's processors that others had since."""
    own = resource.getrusage(resource.RUSAGE_CHILDREN)
    others = busy_seconds() - begin - (own.ru_utime + own.ru_stime - own_begin)
    return max(others, 0.0) / (wall * psutil.cpu_count())


def hpcgen(ranks: int, work: Path, *arguments: object) -> tuple[str, float]:
    """What a command printed, and how much others disturbed it."""
    mpirun = [str(Path(sys.executable).with_name("mpirun")), "-n", str(ranks)] if ranks > 1 else []
    command = [*mpirun, sys.executable, "-m", "hpcgen.cli", *map(str, arguments)]
    environment = os.environ | {"HPCGEN_CACHE": str(work / "cache")}
    own = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin, busy = time.monotonic(), busy_seconds()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    disturbed = disturbance(busy, own.ru_utime + own.ru_stime, time.monotonic() - begin)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout, disturbed


def write_requests(file: Path, load: Workload) -> Path:
    """Prompts of random tokens, outputs of exactly the workload's lengths."""
    generator = np.random.default_rng(0)
    lines = []
    for index, (prompt, output) in enumerate(zip(load.prompts.tolist(), load.outputs.tolist(), strict=True)):
        tokens = generator.integers(3, 8000, prompt).tolist()
        body = {"prompt": tokens, "max_tokens": output, "ignore_eos": True, "temperature": 0}
        lines.append({"custom_id": f"r{index}", "method": "POST", "url": "/v1/completions", "body": body})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def measure(case: Case, model: Path, work: Path, load: Workload, run: Path) -> dict[str, Any]:
    """Seconds of a real batch, how much it was disturbed, and what its run directory says of its configuration."""
    requests = write_requests(work / "requests.jsonl", load)
    files = ["--input", requests, "--output", run.with_suffix(".jsonl"), "--run-dir", run]
    options = ["--host-memory", HOST_MEMORY, "--max-model-len", 1024]
    options += ["--device-memory", case.budget] if case.budget else []
    options += ["--expert-batch", case.batch] if case.batch else []
    shutil.rmtree(run, ignore_errors=True)
    printed, disturbed = hpcgen(case.ranks, work, "run", "--model", model, *files, *options)
    seconds = re.search(r"prefill, decode\s+([\d.,]+) s, ([\d.,]+) s", printed)
    assert seconds is not None, printed
    events = list(read_events(run / "events.jsonl"))
    (memory,) = [event for event in events if event["event"] == "memory"]
    plan = json.loads((run / "plan.json").read_text())["plan"]
    ran = {"memory": memory, "plan": plan, "units": unit_bytes(work, model)}
    total = float(seconds[1].replace(",", "")) + float(seconds[2].replace(",", ""))
    return {"case": case, "measured": total, "disturbed": disturbed, "ran": ran}


def configuration(case: Case, shape: ModelShape, ran: dict[str, Any], units: dict[str, int]) -> Configuration:
    """What the run had, in the planner's terms."""
    plan, memory = ran["plan"], ran["memory"]

    def phase(name: str, attention: int, batch: int) -> PhaseConfiguration:
        division = memory["phases"].get(name)
        if division is None:
            return PhaseConfiguration(attention, batch, shape.layers, 0)
        streamed = sum(size for unit, size in units.items() if unit not in division["resident"])
        layers = min(round(streamed / layer_bytes(shape, 1)), shape.layers)
        slots = min(division["ring_slots"], layers)
        is_streamed = name == "decode" and division["kv"] == "layers"
        return PhaseConfiguration(attention, batch, shape.layers - layers, slots, division["kv_bytes"], is_streamed)

    return Configuration(
        ranks=case.ranks,
        ranks_per_node=case.ranks,
        prefill=phase("prefill", plan["attention_microbatch"], plan["expert_batch"]),
        decode=phase("decode", plan["decode_microbatch"], plan["decode_batch"]),
        host_pages=memory["host_pages"],
        watermark=plan["watermark"],
        refill_below=plan["refill_below"],
        partition_below=plan["partition_below"],
        in_place=not memory["phases"],
    )


def predict(case: Case, shape: ModelShape, profile: Profile, load: Workload, ran: dict[str, Any]) -> float:
    costs = profile.costs(shape, case.ranks)
    costs = costs.with_budget() if case.budget else costs
    chosen = configuration(case, shape, ran, ran["units"])
    return Simulation(costs, chosen, load, decision_steps=DECISION_STEPS).run().seconds


def profiled(case: Case, model: Path, work: Path) -> dict[str, Any]:
    shutil.rmtree(work / "cache" / "profiles", ignore_errors=True)
    _, disturbed = hpcgen(case.ranks, work, "profile", "--model", model)
    (made,) = (work / "cache" / "profiles").glob("*.json")
    return {"disturbed": disturbed, "profile": json.loads(made.read_text())}


def better(file: Path, make: Callable[[], dict[str, Any]]) -> None:
    """Makes what is not there yet, or makes it again where others disturbed it; the less disturbed one stays."""
    before = json.loads(file.read_text())["disturbed"] if file.exists() else 1.0
    if before <= DISTURBED:
        return
    made = make()
    if not file.exists() or made["disturbed"] < before:
        file.write_text(json.dumps(made))


def unit_bytes(work: Path, model: Path) -> dict[str, int]:
    from hpcgen.model.weight_cache import cached_weight_file
    from hpcgen.model.weight_file import WeightFile

    weights = WeightFile(cached_weight_file(model, torch.bfloat16, "packed", cache=work / "cache"))
    return {unit: stop - start for unit in weights.units for start, stop in [weights.unit_range(unit)]}


def table(records: list[dict[str, Any]]) -> None:
    print("| model | ranks | sequences | prompts | outputs | device | predicted, s | measured, s | error | others |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    errors = []
    for record in records:
        case, predicted, measured = Case(*record["case"]), record["predicted"], record["measured"]
        errors.append(abs(predicted / measured - 1))
        place = case.budget or "in place"
        place += f", B_moe {case.batch}" if case.batch else ""
        print(f"| {case.model} | {case.ranks} | {case.sequences} | {case.prompts} | {case.outputs} | {place} "
              f"| {predicted:.2f} | {measured:.2f} | {predicted / measured - 1:+.1%} "
              f"| {record['disturbed']:.0%} |")  # fmt: skip
    print(f"\n{len(errors)} runs: median error {np.median(errors):.1%}, worst {max(errors):.1%}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--seconds", type=float, default=1e9, help="after which nothing new is begun")
    parser.add_argument("--models", nargs="*", default=["dense", "moe"])
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    models = {"dense": args.model.resolve(), "moe": mixture_of_experts(args.work / "moe", args.model)}
    stop = time.monotonic() + args.seconds
    for index, case in enumerate(CASES):
        if case.ranks not in args.ranks or case.model not in args.models:
            continue
        model = models[case.model]
        profile = args.work / f"{case.model}-{case.ranks}.json"
        load = Workload.of(draw(case.prompts, case.sequences, 1), draw(case.outputs, case.sequences, 2))
        kept = args.work / f"case-{index}.json"
        if time.monotonic() < stop:
            better(profile, lambda: profiled(case, model, args.work))  # noqa: B023
        if time.monotonic() < stop:
            better(kept, lambda: measure(case, model, args.work, load, args.work / f"case-{index}.run"))  # noqa: B023
    for index, case in enumerate(CASES):
        kept, profile = args.work / f"case-{index}.json", args.work / f"{case.model}-{case.ranks}.json"
        if kept.exists() and profile.exists():
            content = json.loads(kept.read_text())
            load = Workload.of(draw(case.prompts, case.sequences, 1), draw(case.outputs, case.sequences, 2))
            made = args.work / "profile.json"
            made.write_text(json.dumps(json.loads(profile.read_text())["profile"]))
            measured = Profile.read(made)
            content["predicted"] = predict(case, ModelShape.of(measured.shape), measured, load, content["ran"])
            kept.write_text(json.dumps(content))
    records = sorted(args.work.glob("case-*.json"), key=lambda path: int(path.stem.split("-")[1]))
    table([json.loads(path.read_text()) for path in records])


if __name__ == "__main__":
    main()
