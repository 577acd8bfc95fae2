"""What goes into the scheduler and what comes out: topology and limits, reports, plans. Frozen data, no behaviour.

The scheduler counts pages and tokens; which page or which byte is the business of `memory`.
"""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain, repeat
from typing import NamedTuple

from hpcgen.sequence import PAGE_TOKENS


class Phase(Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Topology:
    """Ranks of the instance and the node of each."""

    node_of_rank: tuple[int, ...] = (0,)

    @property
    def ranks(self) -> int:
        return len(self.node_of_rank)

    @property
    def nodes(self) -> int:
        return max(self.node_of_rank) + 1


@dataclass(frozen=True, slots=True)
class Limits:
    """What the planner, or the user, allows. Pages are KV pages of PAGE_TOKENS tokens, all layers."""

    host_pages: int
    """Pages in the host store of each node."""
    device_pages: int | None = None
    """Pages that one rank's device holds in decode. None: the host store is used in place and only it limits."""
    wave_tokens: int = 8192
    """Prompt tokens prefilled by one rank in one sweep (`B_moe` of the prefill)."""
    max_active: int = 1024
    """Most sequences one rank decodes at once (`B_moe` of the decode)."""
    decision_steps: int = PAGE_TOKENS
    """Decode steps between two decisions; at most PAGE_TOKENS, so that a sequence needs at most one page more."""
    watermark: float = 0.9
    """Prefill goes on until this share of the host store is in use."""
    refill_below: float = 0.5
    """Decode gives way to a prefill phase when active + suspended sequences fall below this share of
    ranks * max_active while sequences wait and the host store has room for them below the watermark."""
    partition_below: int = 0
    """PARTITION starts when no more than this many sequences are left in the instance. 0: never."""
    split_last: bool = True
    """Whether ranks can decode the last sequence together; where not, PARTITION only spreads the last ones."""
    migrate: bool = True
    """Whether MIGRATE between nodes may be used."""


class Chunk(NamedTuple):
    """Tokens [start, start + tokens) of a sequence, to be prefilled."""

    sequence: int
    start: int
    tokens: int


class Chunks:
    """Chunks in order. Their numbers are in one array: that is small on the wire, and in a wave of a hundred thousand
    the garbage collector has one object to look at."""

    __slots__ = ("_numbers",)

    def __init__(self, chunks: Iterable[Chunk] = ()) -> None:
        self._numbers = array("q")
        for chunk in chunks:
            self.add(*chunk)

    def add(self, sequence: int, start: int, tokens: int) -> None:
        self._numbers.extend((sequence, start, tokens))

    def add_whole(self, sequences: Iterable[int], tokens: Iterable[int]) -> None:
        """All tokens of each sequence."""
        self._numbers.extend(chain.from_iterable(zip(sequences, repeat(0), tokens)))

    def rows(self) -> Iterator[tuple[int, int, int]]:
        """(sequence, start, tokens) of each."""
        numbers = iter(self._numbers)
        return zip(numbers, numbers, numbers, strict=True)

    @property
    def sequences(self) -> list[int]:
        return self._numbers[0::3].tolist()

    @property
    def tokens(self) -> int:
        """Of all together."""
        return sum(self._numbers[2::3])

    def __iter__(self) -> Iterator[Chunk]:
        return map(Chunk._make, self.rows())

    def __len__(self) -> int:
        return len(self._numbers) // 3

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chunks) and self._numbers == other._numbers

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Chunks({list(self)})"


@dataclass(frozen=True, slots=True)
class Migration:
    """MIGRATE: the destination node pulls the sequence's pages from the source node's host store."""

    sequence: int
    source: int
    destination: int
    pages: int


@dataclass(slots=True)
class RankPlan:
    """What one rank does until the next decision, in this order."""

    discard: list[int] = field(default_factory=list)
    """Drop the KV of these; they wait for a new prefill (recompute)."""
    suspend: list[int] = field(default_factory=list)
    """YIELD: write back to the host store and release the device."""
    resume: list[int] = field(default_factory=list)
    """COMBINE: load onto the device and decode with the rest."""
    chunks: Chunks = field(default_factory=Chunks)
    """The wave, in a prefill phase; oldest sequence first, a sequence's chunks in order."""


@dataclass(slots=True)
class Plan:
    """A decision for the whole instance. All ranks are in one phase: experts are spread over them."""

    phase: Phase
    ranks: list[RankPlan]
    steps: int = 0
    """Decode steps until the next decision."""
    migrations: list[Migration] = field(default_factory=list)
    """MIGRATEs to start now; they run beside the computation and are reported when done."""
    partition: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """PARTITION: (sequence, ranks it is spread over by tensor parallelism); empty when none is."""


@dataclass(frozen=True, slots=True)
class Load:
    """Where the sequences of an instance stand, for progress and reports."""

    active: list[int]
    """Sequences that decode, by rank."""
    suspended: int
    waiting: int
    """Sequences that no wave has taken in full."""
    host_pages: list[int]
    """Pages of KV in the host store, by node."""


@dataclass(slots=True)
class Report:
    """What one rank did with its part of the last plan."""

    rank: int
    steps: int = 0
    """Decode steps done; every active sequence that is not in `finished` grew by as many tokens."""
    finished: list[int] = field(default_factory=list)
    """Sequences that ended, by a stop, by their length or by an error of their own: their pages are free."""
    prefilled: Chunks = field(default_factory=Chunks)
    migrated: list[int] = field(default_factory=list)
    """Sequences whose MIGRATE to this rank's node is complete and verified."""
    returned: list[int] = field(default_factory=list)
    """Sequences whose MIGRATE to this rank's node failed: they are at the source as they were."""
    lost: list[int] = field(default_factory=list)
    """Sequences whose KV is gone (MIGRATE from a dead node): they wait for a new prefill."""
