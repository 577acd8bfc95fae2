"""Active sequences by rank over a long-tailed batch, with and without MIGRATE: `python results/balance.py`.

Four ranks on two nodes by name decode with a tiny random model; the lengths of outputs are log-normal. The spread is
the most minus the least active sequences of a rank, at each decision of a decode phase.
"""

import argparse
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

SEQUENCES, AT_ONCE = 240, 24


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--no-migrate", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--model", help="not used: the model is a tiny one")
    arguments = parser.parse_args()
    if arguments.rank:
        measure(arguments.rank, not arguments.no_migrate)
        return
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "llama"
        save_tiny("llama", model, torch.float32)
        save_tokenizer(model)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HPCGEN_CACHE": directory, "PYTHONPATH": str(ROOT)}
        for option in ([], ["--no-migrate"]):
            rank = [sys.executable, __file__, "--rank", str(model), *option]
            command = [str(Path(sys.executable).with_name("mpirun"))]
            command += ["-n", "2", "-env", NODE_NAME, "a", *rank, ":", "-n", "2", "-env", NODE_NAME, "b", *rank]
            subprocess.run(command, env=environment, check=True)


def batch() -> list[Sequence]:
    draw = random.Random(2)
    sequences = []
    for index in range(SEQUENCES):
        prompt = array("I", [draw.randrange(3, 250) for _ in range(8)])
        tokens = min(int(draw.lognormvariate(3.6, 1.0)) + 1, 400)
        sequences.append(Sequence(index, index, 0, prompt, SamplingParams(max_tokens=tokens, temperature=0.0)))
    return sequences


def measure(model: Path, migrate: bool) -> None:
    with open_world() as world:
        options = InstanceOptions(
            model=model, dtype=torch.float32, device="cpu", max_model_len=450, host_memory=64 << 20,
            expert_batch=AT_ONCE, threads=1, migrate=migrate, partition_below=0,
        )  # fmt: skip
        prepared = prepare(world, options)
        weights = open_weights(world, model, prepared.options, lambda line: None)
        if not world.leads:
            follow(world, (assembly := prepared.build_rank(world, weights)).worker)
            assembly.worker.close()
            return
        engine, _ = prepared.build_engine(world, weights)
        for sequence in batch():
            engine.add(sequence)
        loads = []
        while engine.pending:
            engine.step()
            if engine.activity.phase is Phase.DECODE and engine.pending:
                loads.append(engine.load.active)
        engine.stop()
        engine.close()
        world.others_ended = False
        spread = [max(active) - min(active) for active in loads]
        idle = sum(1 for active in loads if min(active) == 0 and max(active) > 1)
        print(
            f"MIGRATE {'on ' if migrate else 'off'}: {engine.activity.migrated} migrated; {len(loads)} decisions in "
            f"decode; spread of active sequences over ranks: mean {mean(spread):.1f}, most {max(spread)} of {AT_ONCE}; "
            f"a rank had none while another had several in {idle} decisions",
            flush=True,
        )


if __name__ == "__main__":
    main()
