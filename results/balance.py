"""Active sequences by rank over a long-tailed batch, with and without MIGRATE: `python results/balance.py`.

Ranks decode with a tiny random model; the lengths of outputs are log-normal, and in the clustered batch they rise with
the place in the input, so that one node gets more of the long ones. The spread is the most minus the least active
sequences of a rank, at each decision of a decode phase. Writes the table to results/balance.md and the active sequences
of each rank over the decisions to results/balance.svg.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from array import array
from pathlib import Path
from statistics import mean

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from hpcgen.cluster.coordinator import follow  # noqa: E402
from hpcgen.cluster.world import NODE_NAME, open_world  # noqa: E402
from hpcgen.jobs.instance import InstanceOptions, open_weights, prepare  # noqa: E402
from hpcgen.scheduler import Phase  # noqa: E402
from hpcgen.sequence import SamplingParams, Sequence  # noqa: E402
from tests.model.tiny_models import save_tiny  # noqa: E402
from tests.tiny_tokenizer import save_tokenizer  # noqa: E402

SEQUENCES, AT_ONCE = 400, 24
CASES = [
    ("shuffled", (2,), "on"),
    ("shuffled", (4,), "on"),
    ("shuffled", (2, 2), "on"),
    ("shuffled", (2, 2), "off"),
    ("clustered", (2, 2), "on"),
    ("clustered", (2, 2), "off"),
]
"""(order of the input, ranks of each node, MIGRATE)."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", nargs=3, metavar=("MODEL", "ORDER", "MIGRATE"), help=argparse.SUPPRESS)
    parser.add_argument("--model", help="not used: the model is a tiny one")
    arguments = parser.parse_args()
    if arguments.rank:
        model, order, migrate = arguments.rank
        measure(Path(model), order, migrate == "on")
        return
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "llama"
        save_tiny("llama", model, torch.float32)
        save_tokenizer(model)
        found = [run(model, *case) for case in CASES]
    (ROOT / "results" / "balance.md").write_text(table(found))
    draw(found[4]["active"], found[5]["active"])
    print(table(found))


def run(model: Path, order: str, nodes: tuple[int, ...], migrate: str) -> dict:
    """What rank 0 measured."""
    command = [str(Path(sys.executable).with_name("mpirun"))]
    for index, ranks in enumerate(nodes):
        command += [":"] * bool(index) + ["-n", str(ranks), "-env", NODE_NAME, f"node{index}"]
        command += [sys.executable, __file__, "--rank", str(model), order, migrate]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HPCGEN_CACHE": str(model.parent), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def batch(order: str) -> list[Sequence]:
    draw = random.Random(2)
    lengths = [min(int(draw.lognormvariate(3.6, 1.0)) + 1, 400) for _ in range(SEQUENCES)]
    if order == "clustered":
        lengths.sort()
    sequences = []
    for index, tokens in enumerate(lengths):
        prompt = array("I", [draw.randrange(3, 250) for _ in range(8)])
        sequences.append(Sequence(index, index, 0, prompt, SamplingParams(max_tokens=tokens, temperature=0.0)))
    return sequences


def measure(model: Path, order: str, migrate: bool) -> None:
    """One rank; rank 0 prints its findings as JSON."""
    with open_world() as world:
        options = InstanceOptions(
            model=model, dtype=torch.float32, device="cpu", max_model_len=450, host_memory=64 << 20,
            attention_microbatch=AT_ONCE, expert_batch=AT_ONCE, threads=1, migrate=migrate,
        )  # fmt: skip
        prepared = prepare(world, options)
        weights = open_weights(world, model, prepared.options, lambda line: None)
        if not world.leads:
            follow(world, (assembly := prepared.build_rank(world, weights)))
            assembly.close()
            return
        engine, _ = prepared.build_engine(world, weights)
        for sequence in batch(order):
            engine.add(sequence)
        active = []
        while engine.pending:
            engine.step()
            if engine.activity.phase is Phase.DECODE and engine.pending:
                active.append(engine.load.active)
        migrated = engine.activity.migrated
        engine.stop()
        engine.close()
        world.others_ended = False
        nodes = [world.node_of_rank.count(node) for node in range(world.nodes)]
        found = {"order": order, "nodes": nodes, "migrate": migrate, "migrated": migrated, "active": active}
        print(json.dumps(found), flush=True)


def table(found: list[dict]) -> str:
    lines = [
        "# Balance over ranks",
        "",
        f"`python results/balance.py`: MPICH, {SEQUENCES} sequences, prompts of 8 tokens, log-normal outputs (median "
        f"37, most 400), at most {AT_ONCE} active on a rank; nodes are names on one host. Clustered: the input is "
        "sorted by the length of its outputs. The spread is the most minus the least active sequences of a rank at a "
        "decision.",
        "",
        "| input | ranks by node | MIGRATE | migrated | decisions in decode | spread: mean | most | decisions with a "
        "rank idle while another has several |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in found:
        spread = [max(active) - min(active) for active in case["active"]]
        idle = sum(1 for active in case["active"] if min(active) == 0 and max(active) > 1)
        migrate = ("on" if case["migrate"] else "off") if len(case["nodes"]) > 1 else "one node"
        lines.append(
            f"| {case['order']} | {' + '.join(map(str, case['nodes']))} | {migrate} | {case['migrated']} | "
            f"{len(spread)} | {mean(spread):.1f} | {max(spread)} | {idle} |"
        )
    lines += [
        "",
        "![Active sequences of each rank](balance.svg)",
        "",
        "Refill evens the ranks of a node out at every decision, and PARTITION spreads the last ones. Nothing "
        "migrated: waves are dealt in short runs, which kept both nodes supplied to the end, so that this table does "
        "not show what MIGRATE is worth. Clustered input, above with MIGRATE, below without.",
    ]
    return "\n".join(lines) + "\n"


def draw(with_migrate: list[list[int]], without: list[list[int]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    for axes, active, title in zip(
        figure.subplots(2, sharex=True), (with_migrate, without), ("on", "off"), strict=True
    ):
        for rank, counts in enumerate(zip(*active, strict=True)):
            axes.step(range(len(counts)), counts, where="post", label=f"rank {rank}", linewidth=1)
        axes.set_ylabel(f"active, MIGRATE {title}")
        axes.set_ylim(0, AT_ONCE + 1)
    axes.set_xlabel("decision in decode")
    axes.legend(loc="upper right", fontsize="small", ncols=4)
    figure.savefig(ROOT / "results" / "balance.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
