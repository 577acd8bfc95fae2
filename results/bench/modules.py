"""Where the time of a batch goes, and how near each part is to what the machine can do: a table in Markdown.

    python results/bench/modules.py --model NAME=DIR [--model ...] [--requests 128] [--prompt 128] [--tokens 128]

The engine runs in this process, with a clock around every kernel; each model in a process of its own.
"""

import argparse
import ctypes
import json
import mmap
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from arguments import parse_pair
from workloads import even, write

from hpcgen import LLM, SamplingParams
from hpcgen.engine import forward
from hpcgen.engine.executor import Executor
from hpcgen.kernels.native.library import AttentionCall, ExpertsCall, NativeLibrary, native_library

READ_BYTES = 2 << 30
EXPLANATION = (
    '"Of the machine": the least time that the floating-point operations of a part (at the rate of products in '
    "registers) or its bytes of weights and KV (at the rate of reading memory), whichever is longer, would take, as a "
    "share of the time that it took. Both rates are measured just before."
)


@dataclass
class Part:
    """What one kind of call did in one phase."""

    calls: int = 0
    seconds: float = 0.0
    least: float = 0.0
    """Seconds that the machine would need."""


@dataclass(frozen=True)
class Machine:
    flops: float
    bytes: float

    def least(self, flops: float, size: float) -> float:
        return max(flops / self.flops, size / self.bytes)


def measure_machine(library: NativeLibrary) -> Machine:
    """The best of some rounds, on all threads."""
    flops = max(_rate(lambda: library.peak_products(2_000_000)) for _ in range(3))
    region = mmap.mmap(-1, READ_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    region.madvise(mmap.MADV_HUGEPAGE)  # as weights and KV are, where the system has them
    memory = torch.frombuffer(region, dtype=torch.int64).fill_(1)

    def read() -> float:
        memory.max()
        return READ_BYTES

    read()
    return Machine(flops, max(_rate(read) for _ in range(5)))


def _rate(work: Callable[[], float]) -> float:
    start = time.perf_counter()
    return work() / (time.perf_counter() - start)


class Clock:
    """Puts itself around the kernels of `NativeLibrary` and the sampling of the engine."""

    def __init__(self, machine: Machine, vocabulary: int) -> None:
        self._machine, self._vocabulary = machine, vocabulary
        self.parts: dict[tuple[str, str], Part] = {}
        self.totals = {"prefill": 0.0, "decode": 0.0}
        self._phase = ""
        self._around(NativeLibrary, "linear", self._linear)
        self._around(NativeLibrary, "gated_mlp", self._gated_mlp)
        self._around(NativeLibrary, "experts", self._experts)
        self._around(NativeLibrary, "attention", self._attention)
        for name in ("rms_norm", "rotate_and_write", "write_pages"):
            self._around(NativeLibrary, name, lambda *arguments: ("norms, rotation, KV", 0.0, 0.0))
        self._around(forward, "sample", lambda *arguments: ("sampling", 0.0, 0.0))
        self._phases(Executor)

    def _around(self, owner: Any, name: str, describe: Callable[..., tuple[str, float, float]]) -> None:
        own = getattr(owner, name)

        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = own(*arguments)
            seconds = time.perf_counter() - start
            what, flops, size = describe(*arguments)
            part = self.parts.setdefault((self._phase, what), Part())
            part.calls += 1
            part.seconds += seconds
            part.least += self._machine.least(flops, size)
            return result

        setattr(owner, name, timed)

    def _phases(self, executor: type[Executor]) -> None:
        for phase in self.totals:
            own = getattr(executor, f"_{phase}")

            def timed(*arguments: Any, own: Callable = own, phase: str = phase) -> Any:
                self._phase, start = phase, time.perf_counter()
                result = own(*arguments)
                self.totals[phase] += time.perf_counter() - start
                return result

            setattr(executor, f"_{phase}", timed)

    def _linear(self, library: NativeLibrary, x: torch.Tensor, weights: Any, biases: Any) -> tuple[str, float, float]:
        size = sum(weight.shape[0] * weight.shape[1] for weight in weights)
        what = "output head" if weights[0].shape[0] == self._vocabulary else "projections"
        return what, 2.0 * len(x) * size, 2.0 * size

    def _gated_mlp(self, library: NativeLibrary, x: torch.Tensor, gate: Any, *rest: Any) -> tuple[str, float, float]:
        size = 3 * gate.shape[0] * gate.shape[1]
        return "dense MLP", 2.0 * len(x) * size, 2.0 * size

    def _experts(self, library: NativeLibrary, call: ExpertsCall) -> tuple[str, float, float]:
        size = 3.0 * call.inner * call.intermediate
        used = min(call.count, call.tokens * call.top_k)
        return "experts", 2.0 * call.tokens * call.top_k * size, 2.0 * used * size

    def _attention(self, library: NativeLibrary, call: AttentionCall, dtype: torch.dtype) -> tuple[str, float, float]:
        count = call.sequences
        contexts = torch.frombuffer(_int32(call.context_lengths, count), dtype=torch.int32).double()
        offsets = torch.frombuffer(_int32(call.query_offsets, count + 1), dtype=torch.int32).double()
        new = offsets.diff()
        pairs = float((new * (contexts - new) + new * (new + 1) / 2).sum())
        latent = call.rope_width > 0
        widths = 2 * call.width + call.rope_width if latent else call.width + call.value_width
        stored = call.width + call.rope_width if latent else call.groups * (call.width + call.value_width)
        what = "attention, latent" if latent else "attention"
        return what, 2.0 * call.heads * widths * pairs, 2.0 * stored * float(contexts.sum())


def _int32(address: int, count: int) -> Any:
    return (ctypes.c_int32 * count).from_address(address)


def report(name: str, clock: Clock, seconds: float, machine: Machine) -> str:
    rates = f"{machine.flops / 1e9:,.0f} GFLOP/s in registers and {machine.bytes / 1e9:.0f} GB/s read"
    lines = [
        f"\n**{name}**: {seconds:.1f} s where the machine has {rates}\n",
        "| phase | part | calls | s | of the phase | of the machine |",
    ]
    lines.append("|---|---|---|---|---|---|")
    least_of_all = 0.0
    for phase, total in clock.totals.items():
        parts = sorted((p for p in clock.parts.items() if p[0][0] == phase), key=lambda p: -p[1].seconds)
        rest = total - sum(part.seconds for _, part in parts)
        for (_, what), part in parts:
            share = f"{part.least / part.seconds:.0%}" if part.least else ""
            lines.append(
                f"| {phase} | {what} | {part.calls} | {part.seconds:.2f} | {part.seconds / total:.0%} | {share} |"
            )
        least = sum(part.least for _, part in parts)
        least_of_all += least
        lines.append(f"| {phase} | everything else | | {rest:.2f} | {rest / total:.0%} | |")
        lines.append(f"| {phase} | all | | {total:.2f} | | {least / total:.0%} |")
    lines.append(f"| | the whole run | | {seconds:.2f} | | {least_of_all / seconds:.0%} |")
    return "\n".join(lines)


def measure(name: str, directory: Path, requests: int, prompt: int, tokens: int, library: NativeLibrary) -> str:
    """The table of one model."""
    with tempfile.TemporaryDirectory() as scratch:
        file = write("W1", requests, directory, Path(scratch) / "requests.jsonl", even(prompt, tokens))
        prompts = [json.loads(line)["body"]["prompt"] for line in file.open()]
    machine = measure_machine(library)
    with LLM(directory) as llm:
        llm.generate(prompts[:2], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
        clock = Clock(machine, json.loads((directory / "config.json").read_text())["vocab_size"])
        wanted = SamplingParams(temperature=0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True)
        start = time.perf_counter()
        llm.generate(prompts, wanted, use_tqdm=False)
        seconds = time.perf_counter() - start
    return report(name, clock, seconds, machine)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=parse_pair, action="append", required=True, metavar="NAME=DIR")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each output")
    arguments = parser.parse_args()
    library = native_library()
    if library is None:
        raise SystemExit("the C++ kernels cannot be built here")
    if len(arguments.model) == 1:
        name, directory = arguments.model[0]
        print(measure(name, directory, arguments.requests, arguments.prompt, arguments.tokens, library), flush=True)
        return
    print(f"# Where the time of a batch goes\n\n`python results/bench/modules.py {' '.join(sys.argv[1:])}`\n")
    print(
        f"{arguments.requests} requests of {arguments.prompt} tokens in and {arguments.tokens} out, {library.isa}, "
        f"{torch.get_num_threads()} threads. {EXPLANATION}",
        flush=True,
    )
    sizes = [f"--{size}={getattr(arguments, size)}" for size in ("requests", "prompt", "tokens")]
    for name, directory in arguments.model:  # each in a process of its own, with its own clocks
        subprocess.run([sys.executable, __file__, f"--model={name}={directory}", *sizes], check=True)


if __name__ == "__main__":
    main()
