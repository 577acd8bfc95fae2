"""Sequences and pages for the tests of this room."""

from array import array

import numpy as np

from hpcgen.checkpoint.reader import StoredPages
from hpcgen.sequence import PAGE_TOKENS, Grammar, SamplingParams, Sequence, Status, TokenLogprob, pages_for

PAGE_BYTES = 1024
LAYOUT = {"layers": 2, "dtype": "float32"}


class Store:
    """A host store of pages with distinct contents."""

    def __init__(self, count=64, seed=0):
        self.rows = np.random.default_rng(seed).integers(0, 256, (count, PAGE_BYTES), np.uint8)
        self.next = 0

    def take(self, count):
        self.next += count
        return list(range(self.next - count, self.next))

    def read(self, page):
        return self.rows[page].data


def sequence(request, length=100, output=20, store=None, sample=0, **changes):
    """A decoding sequence of `length` tokens, `output` of them generated; with pages where there is a store."""
    tokens = array("I", [(request * 7919 + i) % 50_000 for i in range(length)])
    s = Sequence(
        id=request,
        request=request,
        sample=sample,
        prompt=tokens[: length - output],
        output=tokens[length - output :],
        sampling=SamplingParams(max_tokens=200, temperature=0.0, key=2**64 - 1 - request),
        status=Status.ACTIVE,
    )
    if store is not None:
        s.kv_length = length - 1
        s.pages = store.take(pages_for(s.kv_length))
    for name, value in changes.items():
        setattr(s, name, value)
    return s


def rich_sequence(request=5):
    """A sequence with something in every field."""
    sampling = SamplingParams(
        max_tokens=9,
        min_tokens=2,
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        key=2**63 + 11,
        stop=("ende", "\n\n", "日本"),
        stop_token_ids=(2, 7),
        logprobs=3,
        grammar=Grammar("regex", "[0-9]{1,3} Grüße"),
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.1,
        logit_bias=((5, -100.0), (9, 1.5)),
    )
    return sequence(
        request,
        sampling=sampling,
        sample=3,
        status=Status.FINISHED,
        finish_reason="stop",
        text="grüße, 世界",
        error="",
        logprobs=[TokenLogprob(4, -0.25, ((4, -0.25), (8, -1.5))), TokenLogprob(1, -3.0, ())],
    )


def assert_equal(read, written):
    """Same state but for the pages, which belong to a node."""
    for a, b in zip(read, written, strict=True):
        for name in Sequence.__slots__:
            if name != "pages":
                assert getattr(a, name) == getattr(b, name), name


def assert_kv(checkpoint, sequence, store, tokens):
    """The checkpoint serves exactly `tokens` tokens of KV of the sequence, with the bytes of `store`."""
    kv = checkpoint.kv.get((sequence.request, sequence.sample))
    assert (kv.tokens if kv else 0) == tokens
    buffer, files = bytearray(PAGE_BYTES), StoredPages()
    for i in range(-(-tokens // PAGE_TOKENS)):
        files.load(kv, i, memoryview(buffer))
        assert bytes(buffer) == store.rows[sequence.pages[i]].tobytes()
    files.close()
