"""Executes decode steps: every active sequence grows by a token a step."""

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np

from hpcgen.engine.forward import ForwardPass, Microbatch
from hpcgen.engine.microbatch import page_table
from hpcgen.memory.kv.interface import KVPlacement, Span
from hpcgen.sequence import Sequence


class _Group:
    """Sequences of one microbatch over the steps between two decisions, while their pages stay as they are."""

    def __init__(self, sequences: list[Sequence], tables: Seq[Seq[int]] | None):
        self.sequences = sequences
        self.lengths = np.array([sequence.kv_length for sequence in sequences], dtype=np.int64)
        self.last = np.array([sequence.output[-1] for sequence in sequences], dtype=np.int64)
        self.table = None if tables is None else page_table(tables)

    def microbatch(self) -> Microbatch:
        spans = [
            Span(sequence, start, start + 1)
            for sequence, start in zip(self.sequences, self.lengths.tolist(), strict=True)
        ]
        return Microbatch(spans, self.last, self.lengths, self.lengths + 1, range(len(spans)), self.table)

    def keep(self, rows: list[int]) -> None:
        self.sequences = [self.sequences[row] for row in rows]
        self.lengths, self.last = self.lengths[rows], self.last[rows]
        if self.table is not None:
            self.table = self.table[rows]


class DecodeInterval:
    """The steps between two decisions. The active set only shrinks meanwhile."""

    def __init__(self, forward: ForwardPass, kv: KVPlacement, active: Seq[Sequence], microbatch: int):
        """`active`, whose KV can grow by the interval's steps; at most `microbatch` of them in a microbatch."""
        self._forward, self._kv = forward, kv
        self._groups = [
            _Group(part, [kv.table(sequence) for sequence in part] if kv.stable else None)
            for part in _split(active, microbatch, kv.microbatch_pages)
        ]

    @property
    def active(self) -> int:
        return sum(len(group.sequences) for group in self._groups)

    def step(self, append: Callable[[Sequence, int], bool]) -> list[Sequence]:
        """One token for every active sequence. `append(sequence, token)` says whether it ends; returns those."""
        groups = [group for group in self._groups if group.sequences]
        ended: list[Sequence] = []
        for group, tokens in zip(groups, self._forward.run([group.microbatch() for group in groups]), strict=True):
            keep = []
            for row, (sequence, token) in enumerate(zip(group.sequences, tokens, strict=True)):
                sequence.kv_length += 1
                self._kv.advanced(sequence)
                if append(sequence, token):
                    ended.append(sequence)
                else:
                    keep.append(row)
            group.lengths += 1
            group.last = np.array(tokens, dtype=np.int64)
            if len(keep) < len(tokens):
                group.keep(keep)
        self._groups = [group for group in groups if group.sequences]
        return ended


def _split(sequences: Seq[Sequence], count: int, pages: int) -> list[list[Sequence]]:
    """Parts of at most `count` sequences, and of at most `pages` pages, those of the coming steps included."""
    parts: list[list[Sequence]] = []
    free_pages = 0
    for sequence in sequences:
        if not parts or len(parts[-1]) == count or len(sequence.pages) > free_pages:
            parts.append([])
            free_pages = pages
        parts[-1].append(sequence)
        free_pages -= len(sequence.pages)
    return parts
