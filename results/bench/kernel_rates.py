"""The C++ kernels against what the machine allows and against torch, all in one run: a table in Markdown.

    python results/bench/kernel_rates.py [--threads 1]

With one thread, times are processor time of the thread, which other jobs on the machine disturb little; with more, wall
time, for a quiet machine. The peak (products in registers) and the rate of copying are measured beside every row.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch.nn import functional

from hpcgen.kernels.attention.interface import AttentionBackend, AttentionBatch, KVPages
from hpcgen.kernels.attention.kv_layout import KVLayout
from hpcgen.kernels.attention.native import NativeAttention
from hpcgen.kernels.attention.torch_reference import TorchAttention
from hpcgen.kernels.experts.grouped import GroupedExperts
from hpcgen.kernels.experts.interface import ExpertsBackend, ExpertWeights
from hpcgen.kernels.experts.native import NativeExperts
from hpcgen.kernels.experts.torch_reference import TorchExperts
from hpcgen.kernels.layouts import PANELS, StoredTensor, pack
from hpcgen.kernels.native.library import NativeLibrary, native_library
from hpcgen.sequence import PAGE_TOKENS, pages_for

BF16 = torch.bfloat16
COPY_BYTES = 256 << 20
LAST_LEVEL_CACHE = 64 << 20
"""Weights of a row are spread over copies until they are larger than this, so that they come from memory."""


class Machine:
    """Rates of the machine, measured again for each row of the table."""

    def __init__(self, library: NativeLibrary, threads: int) -> None:
        self._library = library
        self._clock = time.thread_time if threads == 1 else time.perf_counter
        self._source, self._target = (torch.zeros(COPY_BYTES, dtype=torch.uint8).add_(1) for _ in range(2))

    def seconds(self, function: Callable[[], object], rounds: int = 3) -> float:
        """The fastest round, of at least 50 ms each."""
        function()
        start = self._clock()
        function()
        repeats = max(1, int(0.05 / max(self._clock() - start, 1e-6)))
        times = []
        for _ in range(rounds):
            start = self._clock()
            for _ in range(repeats):
                function()
            times.append((self._clock() - start) / repeats)
        return min(times)

    def peak(self) -> float:
        """Operations a second."""
        operations = self._library.peak_products(200_000)
        return operations / self.seconds(lambda: self._library.peak_products(200_000))

    def copy(self) -> float:
        """Bytes read and written a second."""
        return 2 * COPY_BYTES / self.seconds(lambda: self._target.copy_(self._source), rounds=2)

    def row(self, name: str, operations: float, bytes_read: float, ours: Callable, torchs: Callable | None) -> None:
        seconds = self.seconds(ours)
        other = f"{self.seconds(torchs, 1) / seconds:.1f}" if torchs else ""
        rate, traffic, peak, copy = operations / seconds, bytes_read / seconds, self.peak(), self.copy()
        print(
            f"| {name} | {seconds * 1e3:.3g} | {rate / 1e9:.0f} | {rate / peak:.0%} | {traffic / 1e9:.1f} "
            f"| {traffic / copy:.0%} | {other} |",
            flush=True,
        )


def linears(machine: Machine, library: NativeLibrary) -> None:
    for columns, inner in ((1024, 1024), (4096, 1024), (1536, 576), (49152, 576)):
        size = columns * inner * 2
        copies = -(-LAST_LEVEL_CACHE // size)
        plain = [torch.randn(columns, inner).to(BF16) for _ in range(copies)]
        packed = [pack(weight, PANELS) for weight in plain]
        for rows in (1, 16, 64, 256, 1024, 4096):
            if rows * size * copies > 1e12:
                continue
            x = torch.randn(rows, inner).to(BF16)
            machine.row(
                f"linear {inner} to {columns}, {rows} rows",
                2.0 * rows * columns * inner * copies,
                size * copies,
                lambda x=x, packed=packed: [library.linear(x, [weight], [None]) for weight in packed],
                lambda x=x, plain=plain: [functional.linear(x, weight) for weight in plain],
            )


def experts(machine: Machine, library: NativeLibrary) -> None:
    count, top_k, hidden, intermediate = 64, 4, 1024, 512
    gate_up, down = torch.randn(count, 2 * intermediate, hidden), torch.randn(count, hidden, intermediate)
    stored = [w.mul_(w.shape[-1] ** -0.5).to(BF16) for w in (gate_up, down)]
    plain = _expert_weights(*(StoredTensor(w, tuple(w.shape)) for w in stored))
    packed = _expert_weights(*(pack(w, PANELS) for w in stored))
    native, grouped = NativeExperts(library), GroupedExperts()
    for tokens in (16, 64, 256, 1024, 4096, 8192):
        x = torch.randn(tokens, hidden).to(BF16)
        index, weight = torch.rand(tokens, count).argsort(1)[:, :top_k], torch.rand(tokens, top_k)
        used = len(index.unique())

        def call(backend: ExpertsBackend, weights: ExpertWeights, x=x, index=index, weight=weight) -> Callable:
            return lambda: backend.forward(weights, x, index, weight)

        machine.row(
            f"experts, {tokens} tokens",
            6.0 * tokens * top_k * hidden * intermediate,
            6.0 * used * hidden * intermediate,
            call(native, packed),
            call(grouped, plain),
        )
    fp8 = _expert_weights(*map(_in_fp8, stored))
    for tokens in (64, 1024):
        x = torch.randn(tokens, hidden).to(BF16)
        index, weight = torch.rand(tokens, count).argsort(1)[:, :top_k], torch.rand(tokens, top_k)
        used = len(index.unique())
        machine.row(
            f"experts in fp8 blocks, {tokens} tokens",
            6.0 * tokens * top_k * hidden * intermediate,
            3.0 * used * hidden * intermediate,
            lambda x=x, index=index, weight=weight: native.forward(fp8, x, index, weight),
            lambda x=x, index=index, weight=weight: TorchExperts().forward(fp8, x, index, weight),
        )


def _in_fp8(weight: torch.Tensor) -> StoredTensor:
    scale = torch.full((len(weight), weight.shape[1] // 128, weight.shape[2] // 128), 0.05)
    shape = tuple(weight.shape)
    return StoredTensor((weight * 20).to(torch.float8_e4m3fn), shape, "fp8-block", scale, (128, 128))


def _expert_weights(gate_up: StoredTensor, down: StoredTensor) -> ExpertWeights:
    return ExpertWeights(gate_up, down, None, None, False, False, "silu")


def attention(machine: Machine, library: NativeLibrary) -> None:
    native, reference = NativeAttention(library), TorchAttention()
    decode = [(1, 64 + 960 * i // 255) for i in range(256)]
    shapes = {"16/4 heads of 64": (16, 4, 64), "16/4 heads of 128": (16, 4, 128), "9/3 heads of 64": (9, 3, 64)}
    for name, (heads, groups, width) in shapes.items():
        for what, sequences in (
            ("decode, 256 sequences, context 64 to 1024", decode),
            ("prefill, 32 of 128", [(128, 128)] * 32),
            ("prefill, 4 of 1024", [(1024, 1024)] * 4),
        ):
            kv, batch = _paged(sequences, KVLayout(4, groups, width, groups, width, BF16))
            query = torch.randn(len(batch.positions), heads, width).to(BF16)

            def call(backend: AttentionBackend, query=query, kv=kv, batch=batch) -> Callable:
                return lambda: backend.attend(query, kv, batch, 0.1)

            context = sum(length for _, length in sequences)
            machine.row(
                f"{what}, {name}",
                4.0 * heads * width * _products(sequences),
                4.0 * groups * width * context,
                call(native),
                call(reference),
            )
    for heads in (16, 128):
        rank, rope = 512, 64
        sequences = [(1, 512)] * 64
        kv, batch = _paged(sequences, KVLayout(4, 1, rank, 1, rope, BF16))
        queries = [torch.randn(len(sequences), heads, size).to(BF16) for size in (rank, rope)]

        def latent(backend: AttentionBackend, queries=queries, kv=kv, batch=batch) -> Callable:
            return lambda: backend.attend_latent(*queries, kv, batch, 0.05)

        machine.row(
            f"MLA decode, 64 sequences, context 512, {heads} heads",
            2.0 * heads * (2 * rank + rope) * _products(sequences),
            2.0 * (rank + rope) * _products(sequences),
            latent(native),
            latent(reference),
        )


def _paged(sequences: list[tuple[int, int]], layout: KVLayout) -> tuple[KVPages, AttentionBatch]:
    """(new tokens, context) of each sequence over pages in random order, all of them written."""
    counts = [pages_for(context) for _, context in sequences]
    raw = torch.randn(sum(counts), layout.page_bytes // 2).to(BF16)
    table = torch.zeros(len(sequences), max(counts), dtype=torch.int32)
    for row, pages in zip(table, torch.randperm(sum(counts)).int().split(counts), strict=True):
        row[: len(pages)] = pages
    offsets = torch.tensor([0, *(new for new, _ in sequences)]).cumsum(0).int()
    positions = torch.cat([torch.arange(context - new, context) for new, context in sequences])
    lengths = torch.tensor([context for _, context in sequences], dtype=torch.int32)
    slots = table[torch.arange(len(sequences)).repeat_interleave(offsets.diff()), positions // PAGE_TOKENS].long()
    batch = AttentionBatch(offsets, lengths, table, positions, slots * PAGE_TOKENS + positions % PAGE_TOKENS)
    return layout.layer_view(raw, layout.layer_elements), batch


def _products(sequences: list[tuple[int, int]]) -> int:
    """Pairs of a query and a key that it sees."""
    return sum(sum(range(context - new + 1, context + 1)) for new, context in sequences)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    threads = parser.parse_args().threads
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    library = native_library()
    if library is None:
        raise SystemExit("the C++ kernels cannot be built here")
    machine = Machine(library, threads)
    print(f"{library.isa}, {threads} threads: {machine.peak() / 1e9:.0f} GFLOP/s in registers, ", end="")
    print(f"{machine.copy() / 1e9:.1f} GB/s copied (read and written)\n")
    print("| kernel | ms | GFLOP/s | of peak | GB/s read | of copy | times faster than torch |")
    print("|---|---|---|---|---|---|---|")
    linears(machine, library)
    experts(machine, library)
    attention(machine, library)


if __name__ == "__main__":
    main()
