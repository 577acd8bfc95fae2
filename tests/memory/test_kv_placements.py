"""The three placements of KV, on a fake attention that writes what it can recognise again."""

from array import array

import pytest
import torch

from hpcgen.kernels.attention.kv_layout import KVLayout
from hpcgen.memory.host_store import HostStore
from hpcgen.memory.kv.device_pages import DevicePagesFull, DevicePagesKV
from hpcgen.memory.kv.in_place import InPlaceKV
from hpcgen.memory.kv.interface import KVPlacement, Span
from hpcgen.memory.kv.layer_stream import LayerStreamKV
from hpcgen.memory.streams import ThreadCopyStream
from hpcgen.sequence import PAGE_TOKENS, SamplingParams, Sequence, pages_for

LAYOUT = KVLayout(3, 1, 2, 1, 4, torch.float32)


def placements(device_pages: int = 12) -> list[KVPlacement]:
    stream = ThreadCopyStream()
    return [
        InPlaceKV(HostStore(LAYOUT, 32)),
        DevicePagesKV(HostStore(LAYOUT, 32), torch.zeros(device_pages * LAYOUT.page_bytes, dtype=torch.uint8), stream),
        LayerStreamKV(
            HostStore(LAYOUT, 32), torch.zeros(2 * device_pages * LAYOUT.layer_bytes, dtype=torch.uint8), stream
        ),
    ]


def sequence(number: int) -> Sequence:
    return Sequence(number, number, 0, array("I", range(1000)), SamplingParams(max_tokens=9))


def mark(sequence: Sequence, layer: int, position: int) -> float:
    return sequence.id * 100_000 + layer * 10_000 + position


def forward(kv: KVPlacement, microbatches: list[list[Span]]) -> None:
    """Layer by layer, checks all earlier tokens' KV in each microbatch and writes that of the new ones."""
    accesses = kv.access(microbatches)
    for layer in range(LAYOUT.layers):
        for spans, access in zip(microbatches, accesses, strict=True):
            pages = access.kv(layer)
            for span, table in zip(spans, access.tables, strict=True):
                for position in range(span.stop):
                    page, offset = table[position // PAGE_TOKENS], position % PAGE_TOKENS
                    if position < span.start:
                        assert pages.first[page, offset, 0, 0] == mark(span.sequence, layer, position)
                        assert pages.second[page, offset, 0, 3] == -mark(span.sequence, layer, position)
                    else:
                        pages.first[page, offset] = mark(span.sequence, layer, position)
                        pages.second[page, offset] = -mark(span.sequence, layer, position)
            access.layer_done(layer)


def host_holds(store: HostStore, sequence: Sequence) -> bool:
    return all(
        store.layer(layer).first[sequence.pages[p // PAGE_TOKENS], p % PAGE_TOKENS, 0, 1] == mark(sequence, layer, p)
        for layer in range(LAYOUT.layers)
        for p in range(sequence.kv_length)
    )


@pytest.mark.parametrize("index", [0, 2], ids=["in place", "by layer"])
def test_a_prompt_that_spans_microbatches_finds_the_kv_of_its_earlier_part(index: int) -> None:
    kv = placements()[index]
    a, b = sequence(1), sequence(2)
    for s, tokens in ((a, 300), (b, 70)):
        kv.extend(s, tokens)
    forward(kv, [[Span(a, 0, 100)], [Span(a, 100, 250)], [Span(a, 250, 300), Span(b, 0, 10)], [Span(b, 10, 70)]])
    a.kv_length, b.kv_length = 300, 70
    for s in (a, b):
        kv.suspend(s)
        assert host_holds(kv._store, s)
    free = kv._store.free
    kv.drop(a)
    assert kv._store.free == free + pages_for(300) and a.pages == [] and a.kv_length == 0


@pytest.mark.parametrize("index", [0, 1, 2], ids=["in place", "pages", "by layer"])
def test_decode_survives_suspension_and_the_host_store_is_the_truth_after_it(index: int) -> None:
    kv = placements()[index]
    store = kv._store
    prefill = InPlaceKV(store)
    sequences = [sequence(n) for n in (1, 2, 3)]
    for s, tokens in zip(sequences, (60, 64, 130), strict=True):
        prefill.extend(s, tokens)
        forward(prefill, [[Span(s, 0, tokens)]])
        s.kv_length = tokens
        kv.resume(s)
    for step in range(80):
        if step == 40:
            kv.suspend(sequences[1])
            assert host_holds(store, sequences[1])
            kv.resume(sequences[1])
        for s in sequences:
            kv.extend(s, s.kv_length + 1)
        forward(kv, [[Span(s, s.kv_length, s.kv_length + 1) for s in sequences]])
        for s in sequences:
            s.kv_length += 1
            kv.advanced(s)
    for s in sequences:
        kv.suspend(s)
        assert host_holds(store, s)
        kv.drop(s)
    assert store.free == store.count


def test_filled_pages_are_written_behind_so_that_a_yield_has_one_page_to_write() -> None:
    kv = placements()[1]
    s = sequence(1)
    kv.resume(s)
    kv.extend(s, 3 * PAGE_TOKENS)
    copied = []
    original = kv._stream.copy
    kv._stream.copy = lambda pairs: (copied.append(len(pairs := list(pairs))), original(pairs))[1]
    forward(kv, [[Span(s, 0, 2 * PAGE_TOKENS + 5)]])
    s.kv_length = 2 * PAGE_TOKENS + 5
    kv.advanced(s)
    kv.suspend(s)
    assert copied == [2, 1] and host_holds(kv._store, s)


def test_device_pages_are_never_promised_twice() -> None:
    kv = placements(device_pages=2)[1]
    a, b = sequence(1), sequence(2)
    kv.resume(a)
    kv.resume(b)
    kv.extend(a, PAGE_TOKENS)
    with pytest.raises(DevicePagesFull):
        kv.extend(b, 2 * PAGE_TOKENS)
    kv.drop(a)
    kv.extend(b, 2 * PAGE_TOKENS)
