"""Times the kernels that a model uses, on this machine, one layer's worth at a time.

Shapes: T tokens, B sequences, D hidden, E experts, K experts a token, I intermediate.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from hpcgen.cluster.world import World
from hpcgen.engine.microbatch import attention_batch
from hpcgen.kernels.attention.interface import KVPages
from hpcgen.kernels.attention.kv_layout import KVLayout
from hpcgen.kernels.experts.interface import ExpertWeights
from hpcgen.kernels.layouts import choose_layout, pack
from hpcgen.kernels.linear import linear
from hpcgen.kernels.select import select_attention, select_experts
from hpcgen.memory.streams import open_copy_stream
from hpcgen.planner import work
from hpcgen.planner.model_shape import ModelShape
from hpcgen.planner.roofline import Work
from hpcgen.sequence import pages_for

COLD = 96 << 20
"""Bytes of operands to go round in, so that none is found in a cache where a whole model's would not be."""
MOST_KV = 384 << 20
PAGE_COPIES = 256
READ_BYTES = (1 << 14, 1 << 18, 1 << 21, 1 << 23)
COPY_BYTES = (1 << 12, 1 << 18, 1 << 22, 1 << 26)
TOKENS = (1, 4, 16, 64, 256, 1024, 2048)


@dataclass(frozen=True, slots=True)
class Timing:
    """A measured kernel call."""

    work: Work
    seconds: float


class Stopwatch:
    """Seconds of a call: wall time; with one rank of one CPU thread its processor time, which other processes disturb
    less.

    Several ranks measure the same at the same time, so that what they take from each other is in it.
    """

    def __init__(self, device: torch.device, world: World | None = None):
        self.device, self._world = device, world or World()
        alone = device.type == "cpu" and torch.get_num_threads() == 1 and self._world.size == 1
        self.clock: Callable[[], float] = time.process_time if alone else time.perf_counter

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.clock()

    def seconds(self, calls: Iterator[Callable[[], object]], budget: float = 0.25) -> float:
        """Median of the calls' times, after a first one, until `budget` seconds have passed or nine are taken.

        Collective: the mean of all ranks.
        """
        next(calls)()
        self._world.wait_for_all()
        taken: list[float] = []
        while len(taken) < 3 or (sum(taken) < budget and len(taken) < 9):
            call = next(calls)
            begin = self.now()
            call()
            taken.append(self.now() - begin)
        return self.mean(statistics.median(taken))

    def mean(self, seconds: float) -> float:
        """Over all ranks. Collective."""
        return statistics.fmean(self._world.gather_all(seconds))

    def wait_for_all(self) -> None:
        """So that all ranks measure the same."""
        self._world.wait_for_all()


class KernelTiming:
    """The kernels of one model on one device, with random operands of the model's shapes."""

    def __init__(self, shape: ModelShape, layout: KVLayout, dtype: torch.dtype, watch: Stopwatch):
        self._shape, self._layout, self._dtype, self._device = shape, layout, dtype, watch.device
        self._watch = watch

    @torch.inference_mode()
    def linear(self) -> list[Timing]:
        """Dense layers of the sizes of the projections, of the MLP and of the head."""
        shape = self._shape
        width = shape.dense_parameters // (3 * shape.hidden) or shape.hidden
        sizes = {(shape.attention.query_width, shape.hidden), (width, shape.hidden), (shape.vocabulary, shape.hidden)}
        timings = []
        for rows, columns in sorted(sizes):
            copies = max(COLD // (rows * columns * self._dtype.itemsize), 1)
            weight = self._random(rows, columns)
            stored = pack(weight, self._layout_of("linear", (rows, columns)))
            weights = [stored] + [pack(weight.clone(), stored.layout) for _ in range(min(copies, 64) - 1)]
            for tokens in TOKENS if rows != shape.vocabulary else TOKENS[:5]:
                hidden = self._random(tokens, columns)
                calls = (partial(linear, hidden, weight) for weight in _round(weights))
                moved = (rows * columns + tokens * (rows + columns)) * self._dtype.itemsize
                timings.append(Timing(Work(2 * rows * columns * tokens, moved), self._watch.seconds(calls)))
        return timings

    @torch.inference_mode()
    def decode_attention(self) -> list[Timing]:
        """One query of each sequence, over sequences and context."""
        loads = [(1, 256), (1, 2048), (8, 256), (8, 1024), (32, 128), (32, 512), (128, 64), (128, 128), (512, 32)]
        timings = []
        for sequences, context in loads:
            call = self._attention(sequences, context, 1)
            if call is not None:
                done = work.decode_attention(self._shape, sequences * context, sequences)
                timings.append(Timing(done, self._watch.seconds(call)))
        return timings

    @torch.inference_mode()
    def prefill_attention(self) -> list[Timing]:
        """All queries of prompts, over their number and length."""
        timings = []
        for sequences, length in [(1, 64), (8, 64), (32, 64), (1, 256), (8, 256), (1, 1024), (2, 1024), (1, 2048)]:
            call = self._attention(sequences, length, length)
            if call is not None:
                done = work.prefill_attention(self._shape, sequences * length, length)
                timings.append(Timing(done, self._watch.seconds(call)))
        return timings

    @torch.inference_mode()
    def experts(self) -> list[Timing]:
        """The routed experts of one layer, tokens choosing evenly. Nothing for a dense model."""
        shape = self._shape
        if not shape.experts:
            return []
        width = shape.expert_parameters // (3 * shape.hidden)
        gate_up = self._random(shape.experts, 2 * width, shape.hidden)
        down = self._random(shape.experts, shape.hidden, width)
        copies = max(1, min(COLD // (3 * gate_up.nbytes // 2), 8))
        weights = [
            ExpertWeights(
                pack(gate_up.clone(), self._layout_of("experts", tuple(gate_up.shape))),
                pack(down.clone(), self._layout_of("experts", tuple(down.shape))),
                None, None, False, False, "silu",
            )
            for _ in range(copies)
        ]  # fmt: skip
        backend = select_experts(self._device, self._dtype)
        timings = []
        for tokens in TOKENS:
            hidden = self._random(tokens, shape.hidden)
            index = torch.rand(tokens, shape.experts, device=self._device).topk(shape.experts_per_token).indices
            weight = torch.full(index.shape, 1 / shape.experts_per_token, dtype=self._dtype, device=self._device)
            calls = (partial(backend.forward, stored, hidden, index, weight) for stored in _round(weights))
            timings.append(Timing(work.routed_experts(shape, tokens), self._watch.seconds(calls)))
        return timings

    def copy(self, to_device: bool) -> list[Timing]:
        """Pinned host memory to the device, or back; on a CPU memory to memory."""
        return [Timing(Work(0.0, nbytes), self._copy_seconds(nbytes, to_device)) for nbytes in COPY_BYTES]

    def page_copy(self) -> float:
        """Seconds of a copy of one page's KV of one layer among many, beside its bytes."""
        layout, stream = self._layout, open_copy_stream(self._device)
        on_host = torch.ones(PAGE_COPIES, layout.page_bytes, dtype=torch.uint8)
        on_device = torch.ones(PAGE_COPIES, layout.layer_bytes, dtype=torch.uint8, device=self._device)

        def copy_all() -> None:
            stream.copy([(on_device[page], on_host[page, : layout.layer_bytes]) for page in range(PAGE_COPIES)]).wait()

        seconds = self._watch.seconds(itertools.repeat(copy_all)) / PAGE_COPIES
        stream.close()
        return seconds

    def _copy_seconds(self, nbytes: int, to_device: bool) -> float:
        copies = max(1, min(COLD // nbytes, 64))
        on_host = partial(torch.ones, nbytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        on_device = partial(torch.ones, nbytes, dtype=torch.uint8, device=self._device)
        source_of, target_of = (on_host, on_device) if to_device else (on_device, on_host)
        sources = [source_of() for _ in range(copies)]  # of ones: zeros may share one page
        target = target_of()
        return self._watch.seconds(partial(target.copy_, source) for source in _round(sources))

    def _attention(self, sequences: int, context: int, queries: int) -> Iterator[Callable[[], object]] | None:
        """Calls that write the last `queries` tokens of each sequence and attend from them; None for too much KV."""
        layout, each = self._layout, pages_for(context)
        count = sequences * each
        if count * layout.page_bytes > MOST_KV and count > each:
            return None
        layers = max(1, min(layout.layers, MOST_KV // (count * layout.layer_bytes)))
        pages = torch.zeros(count, layers * layout.layer_bytes, dtype=torch.uint8, device=self._device)
        typed = pages.view(layout.dtype)
        typed.normal_()
        views = [layout.layer_view(typed, layer * layout.layer_elements) for layer in range(layers)]
        table = np.arange(count, dtype=np.int32).reshape(sequences, each)
        stops = np.full(sequences, context, dtype=np.int64)
        batch = attention_batch(stops - queries, stops, table, self._device)
        backend = select_attention(self._device, layout.dtype)
        backend.plan(batch)
        tokens = sequences * queries
        first = self._random(tokens, layout.first_heads, layout.first_dim).to(layout.dtype)
        second = self._random(tokens, layout.second_heads, layout.second_dim).to(layout.dtype)
        shape = self._shape
        if shape.attention.is_latent:
            heads = shape.attention.decode_flops // (2 * (2 * layout.first_dim + layout.second_dim))
            latent = self._random(tokens, heads, layout.first_dim)
            rotary = self._random(tokens, heads, layout.second_dim)

            def attend(kv: KVPages) -> None:
                backend.write(kv, first, second, batch)
                backend.attend_latent(latent, rotary, kv, batch, 0.1)

        else:
            query = self._random(tokens, shape.attention.query_width // layout.first_dim, layout.first_dim)

            def attend(kv: KVPages) -> None:
                backend.write(kv, first, second, batch)
                backend.attend(query, kv, batch, 0.1)

        return (partial(attend, view) for view in _round(views))

    def _random(self, *size: int) -> torch.Tensor:
        return torch.empty(*size, dtype=self._dtype, device=self._device).normal_(std=0.02)

    def _layout_of(self, kind: Literal["linear", "experts"], size: tuple[int, ...]) -> str:
        return choose_layout(kind, size, self._dtype) if self._device.type == "cpu" else "plain"


def disk_reads(file: Path, most: int = 64 << 20) -> list[Timing]:
    """Reads of a file, by size; what is in the page cache is dropped from it first, as far as the system does so."""
    handle = os.open(file, os.O_RDONLY)
    timings = []
    try:
        size = os.fstat(handle).st_size
        for nbytes in READ_BYTES:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            starts = range(0, max(min(size, most, 32 * nbytes) - nbytes + 1, 1), nbytes)
            begin = time.perf_counter()
            done = sum(len(os.pread(handle, nbytes, start)) for start in starts)
            timings.append(Timing(Work(0.0, done / len(starts)), (time.perf_counter() - begin) / len(starts)))
    finally:
        os.close(handle)
    return timings


def _round(items: list[Any]) -> Iterator[Any]:
    while True:
        yield from items
