"""Ranks generate with each model directory given, in each way to work together; rank 0 compares with one process."""

import sys
from array import array
from bisect import bisect_left
from dataclasses import replace
from pathlib import Path

import torch

from hpcgen.cluster.coordinator import Coordinator, follow
from hpcgen.cluster.expert_parallel import experts_of
from hpcgen.cluster.world import World, open_world
from hpcgen.engine.build import device_needs
from hpcgen.engine.engine import Engine
from hpcgen.jobs.instance import InstanceOptions, open_weights, prepare
from hpcgen.kernels.dispatch.interface import expert_range
from hpcgen.memory.budget import OutOfDeviceMemory
from hpcgen.memory.device_plan import divide_for_decode, divide_for_prefill
from hpcgen.model.expert_share import ExpertShare
from hpcgen.sequence import SamplingParams, Sequence

WAYS = {
    "together": {},
    "short of memory": {"host_memory": 900_000},
    "partition": {"partition_below": 99},
    "few at once": {"expert_batch": 2},
    "resident": {"partition_below": 99},
    "streamed": {"partition_below": 99},
}
"""The last two with a device budget: the smallest at which decode holds the parameters of its rank, and at all."""


def batch() -> list[Sequence]:
    """Prompts and outputs of very different lengths, greedy, one after the other ending."""
    generator = torch.Generator().manual_seed(5)
    lengths = [(3, 9), (70, 40), (20, 1), (130, 70), (5, 30), (64, 12), (33, 95)]
    return [
        Sequence(
            index, index, 0, array("I", torch.randint(3, 250, (prompt,), generator=generator).tolist()),
            SamplingParams(max_tokens=tokens, temperature=0.0),
        )
        for index, (prompt, tokens) in enumerate(lengths)
    ]  # fmt: skip


def generate(engine: Engine | Coordinator) -> list[list[int]]:
    for sequence in batch():
        engine.add(sequence)
    ended = []
    for _ in range(3000):
        if not engine.pending:
            break
        ended += engine.step()
    assert not engine.pending, "the engine does not come to an end"
    assert all(sequence.error is None for sequence in ended), [sequence.error for sequence in ended]
    return [list(sequence.output) for sequence in sorted(ended, key=lambda sequence: sequence.id)]


def alone(options: InstanceOptions) -> list[list[int]]:
    prepared = prepare(World(), options)
    weights = open_weights(World(), options.model, prepared.options, lambda line: None)
    return generate(prepared.build_engine(World(), weights)[0])


def smallest_budget(world: World, options: InstanceOptions, way: str) -> int:
    """Bytes of device memory, found by bisection."""
    prepared = prepare(world, options)
    model, weights = prepared.model, open_weights(world, options.model, prepared.options, lambda line: None)
    own = weights
    if (experts := experts_of(model)) is not None:
        own = ExpertShare(weights, model, *expert_range(world.rank, world.size, experts))

    def works(limit: int) -> bool:
        try:
            divide_for_prefill(limit, device_needs(model, weights, prepared.options))
            decode = divide_for_decode(limit, device_needs(model, own, prepared.options))
        except OutOfDeviceMemory:
            return False
        return way == "streamed" or (decode.kv == "pages" and not decode.ring_slots)

    limits = range(1 << 27)
    return max(world.gather_all(bisect_left(limits, True, key=works)))


def together(world: World, options: InstanceOptions, way: str) -> list[list[int]] | None:
    if way in ("resident", "streamed"):
        options = replace(options, device_memory=smallest_budget(world, options, way))
    prepared = prepare(world, options)
    weights = open_weights(world, options.model, prepared.options, lambda line: None)
    if not world.leads:
        assembly = prepared.build_rank(world, weights)
        follow(world, assembly)
        world.wait_for_all()
        assembly.close()
        return None
    engine, assembly = prepared.build_engine(world, weights)
    tokens = generate(engine)
    print(f"{options.model.name}: {engine.activity.migrated} migrated", flush=True)
    if way in ("resident", "streamed"):
        print(f"{options.model.name}: {'split' if assembly.limits.split_last else 'not split'}", flush=True)
    engine.stop()
    world.wait_for_all()
    # A page that is still owned is one that some rank lost.
    assert assembly.store.free == assembly.store.count or world.nodes > 1
    engine.close()
    world.others_ended = False
    return tokens


def main() -> None:
    with open_world() as world:
        for directory in map(Path, sys.argv[2:]):
            options = InstanceOptions(
                model=directory, dtype=torch.float32, device="cpu", max_model_len=200, host_memory=16 << 20,
                attention_microbatch=48, expert_batch=100, threads=1, partition_below=0,
            )  # fmt: skip
            expected = alone(options) if world.leads else None
            for way in sys.argv[1].split(","):
                tokens = together(world, replace(options, **WAYS[way]), way)
                if world.leads:
                    assert tokens == expected, f"{directory.name}, {way}: {tokens} instead of {expected}"
                    print(f"{directory.name} {way}: same", flush=True)


if __name__ == "__main__":
    main()
