"""What the four primitives cost, against the time of the modules they stand between, at 512 sequences.

    python results/primitives.py --model models/smollm2-135m-instruct

Writes results/primitives.md.
"""

import argparse
import statistics
import time
from array import array
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpcgen.cluster.migration import page_checksum
from hpcgen.coroutine.call import ModuleCall, Stage, YieldPoint
from hpcgen.coroutine.hub import Hub, Primitives
from hpcgen.coroutine.wrapper import Policy, combine_policy, wrap, yield_policy
from hpcgen.engine.build import Assembly, EngineOptions, build_engine
from hpcgen.memory.host_store import HostStore
from hpcgen.memory.kv.device_pages import DevicePagesKV
from hpcgen.memory.streams import ThreadCopyStream
from hpcgen.model.causal import CausalModel
from hpcgen.model.weight_cache import cached_weight_file
from hpcgen.model.weight_file import WeightFile
from hpcgen.sequence import SamplingParams, Sequence

SEQUENCES = 512
MICROBATCH = 64
PROMPT = 32
STEPS = 6


def median_seconds(run: Callable[[], object], repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def module_times(directory: Path) -> tuple[dict[Stage, float], Assembly]:
    """Median seconds of one layer's stage for all sequences in one decode step; and the engine, mid-way."""
    seconds: dict[tuple[Stage, int], float] = defaultdict(float)

    def timed(policy: Policy) -> Policy:
        def timing(call: ModuleCall, primitives: Primitives) -> Any:
            own = call.run

            def run(*args: Any, **kwargs: Any) -> Any:
                start = time.perf_counter()
                result = own(*args, **kwargs)
                seconds[call.point.stage, call.point.layer] += time.perf_counter() - start
                return result

            call.run = run
            return policy(call, primitives)

        return timing

    # A decoder layer's own forward contains its MLP stage, where it is suspended: attention is timed at its module.
    model = CausalModel.build(directory, torch.bfloat16, torch.device("cpu"))
    weights = WeightFile(cached_weight_file(directory, torch.bfloat16, "packed"))
    options = EngineOptions(
        max_model_len=256, host_memory=4 << 30, attention_microbatch=MICROBATCH, expert_batch=4096, decision_steps=STEPS
    )
    assembly = build_engine(
        model, weights, options, lambda sequence: None, policies={Stage.EXPERTS: timed(combine_policy)}
    )
    for index in range(model.layers):
        attention = model.attention_stage(index)
        attention.forward = _timed_forward(attention.forward, seconds, index)
    generator = torch.Generator().manual_seed(0)
    for number in range(SEQUENCES):
        prompt = array("I", torch.randint(5, 1000, (PROMPT,), generator=generator).tolist())
        assembly.engine.add(Sequence(number, number, 0, prompt, SamplingParams(max_tokens=100, temperature=0.0)))
    while assembly.engine.activity.steps < STEPS:
        assembly.engine.step()
    seconds.clear()
    before = assembly.engine.activity.steps
    assembly.engine.step()
    steps = assembly.engine.activity.steps - before
    by_stage = {
        stage: statistics.median(value for (s, _), value in seconds.items() if s is stage) / steps
        for stage in (Stage.ATTENTION, Stage.EXPERTS)
    }
    return by_stage, assembly


def _timed_forward(own: Callable[..., Any], seconds: dict[tuple[Stage, int], float], layer: int) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = own(*args, **kwargs)
        seconds[Stage.ATTENTION, layer] += time.perf_counter() - start
        return result

    return forward


class Identity(nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def switch_cost(policy: Policy | None, hidden: int, layers: int = 30) -> float:
    """Seconds that all microbatches spend at one yield point whose module does nothing."""
    hub = Hub(lambda point: None, expert_batch=1 << 30)
    modules = [Identity() for _ in range(layers)]
    for index, module in enumerate(modules):
        if policy is not None:
            wrap(module, YieldPoint(index, Stage.EXPERTS), hub, policy)

    def forward(x: torch.Tensor) -> torch.Tensor:
        for module in modules:
            x = module(x)
        return x

    inputs = [torch.zeros(1, MICROBATCH, hidden, dtype=torch.bfloat16) for _ in range(SEQUENCES // MICROBATCH)]
    with torch.inference_mode():
        return median_seconds(lambda: hub.run([lambda x=x: forward(x) for x in inputs]), 50) / layers


def two_shards(call: ModuleCall, primitives: Primitives) -> Any:
    return primitives.partition(call, [call.run, call.run])


def sequence_costs(assembly: Assembly) -> dict[str, float]:
    """Seconds for one sequence of the engine's length: YIELD and COMBINE over device pages, MIGRATE."""
    layout = assembly.model.kv_layout
    store, other = HostStore(layout, 64), HostStore(layout, 64)
    stream = ThreadCopyStream()
    kv = DevicePagesKV(store, torch.zeros(64 * layout.page_bytes, dtype=torch.uint8), stream)
    sequence = Sequence(0, 0, 0, array("I", range(1, 200)), SamplingParams(max_tokens=10), array("I", [1]))
    kv.resume(sequence)
    kv.extend(sequence, PROMPT + 2 * STEPS)
    sequence.kv_length = PROMPT + 2 * STEPS
    yields, combines = [], []
    for _ in range(200):
        start = time.perf_counter()
        kv.suspend(sequence)
        middle = time.perf_counter()
        kv.resume(sequence)
        yields.append(middle - start)
        combines.append(time.perf_counter() - middle)
    kv.suspend(sequence)
    there = other.allocate(len(sequence.pages))

    def move() -> None:
        """As between nodes, where memory is the network."""
        expected = [page_checksum(store, page) for page in sequence.pages]
        other.pages[there] = store.pages[sequence.pages]
        assert [page_checksum(other, page) for page in there] == expected

    moved = median_seconds(move, 50)
    stream.close()
    return {"YIELD": statistics.median(yields), "COMBINE": statistics.median(combines), "MIGRATE": moved}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    directory = parser.parse_args().model
    modules, assembly = module_times(directory)
    hidden, layers = assembly.model.config.hidden_size, assembly.model.layers
    bare = switch_cost(None, hidden)
    inside = {
        "YIELD": switch_cost(yield_policy, hidden) - bare,
        "COMBINE": switch_cost(combine_policy, hidden) - bare,
        "PARTITION": switch_cost(two_shards, hidden) - bare,
    }
    alone = sequence_costs(assembly)
    layer = modules[Stage.ATTENTION] + modules[Stage.EXPERTS]
    lines = [
        "# Cost of the primitives",
        "",
        f"`python results/primitives.py --model {directory.name}`, {torch.get_num_threads()} CPU threads.",
        f"{SEQUENCES} sequences decode in microbatches of {MICROBATCH}; {layers} layers, hidden {hidden}, bf16.",
        f"One layer of one step takes {layer * 1e3:.2f} ms: attention {modules[Stage.ATTENTION] * 1e3:.2f}, "
        f"MLP {modules[Stage.EXPERTS] * 1e3:.2f}.",
        "",
        "Inside a forward pass, all microbatches at one yield point, module time not counted:",
        "",
        "| primitive | µs | share of the layer |",
        "|---|---|---|",
        *(f"| {name} | {cost * 1e6:.0f} | {cost / layer:.2%} |" for name, cost in inside.items()),
        "",
        f"Between forward passes, one sequence of {PROMPT + 2 * STEPS} tokens "
        f"({assembly.model.kv_layout.page_bytes / 2**20:.2f} MiB a page):",
        "",
        "| primitive | µs | in steps of all sequences |",
        "|---|---|---|",
        *(f"| {name} | {cost * 1e6:.0f} | {cost / (layer * layers):.4f} |" for name, cost in alone.items()),
        "",
        "YIELD writes the last page to the host store, COMBINE loads the sequence's pages, MIGRATE copies them to",
        "another host store and compares checksums.",
    ]
    text = "\n".join(lines) + "\n"
    Path(__file__).with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
