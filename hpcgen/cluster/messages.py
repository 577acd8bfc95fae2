"""What crosses between rank 0 and the others at a decision: orders out, outcomes back. Plain data.

Rank 0 has the truth of every sequence: its tokens, and the pages of its node's host store that hold its KV. A rank
keeps the sequences that it worked on, and returns what changed; another rank that takes one over gets the whole state.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from hpcgen.scheduler.plan import Phase, RankPlan, Report
from hpcgen.sequence import SamplingParams, Sequence, Status, TokenLogprob
from hpcgen.sequence.packing import pack_tokens, unpack_tokens


class SequenceState(NamedTuple):
    """All of a sequence that a rank needs to go on with it."""

    id: int
    request: int
    sample: int
    prompt: bytes
    """Packed tokens."""
    sampling: SamplingParams
    output: bytes
    """Packed tokens."""
    status: Status
    kv_length: int
    pages: list[int]
    logprobs: list[TokenLogprob]
    prompt_logprobs: list[TokenLogprob]

    @classmethod
    def of(cls, s: Sequence) -> "SequenceState":
        return cls(
            s.id, s.request, s.sample, pack_tokens(s.prompt), s.sampling, pack_tokens(s.output), s.status, s.kv_length,
            s.pages, s.logprobs, s.prompt_logprobs,
        )  # fmt: skip

    def sequence(self) -> Sequence:
        return Sequence(
            self.id, self.request, self.sample, unpack_tokens(self.prompt), self.sampling, unpack_tokens(self.output),
            self.status, self.kv_length, list(self.pages), logprobs=list(self.logprobs),
            prompt_logprobs=list(self.prompt_logprobs),
        )  # fmt: skip


class Change(NamedTuple):
    """What became of a sequence since it was last reported."""

    id: int
    status: Status
    kv_length: int
    tokens: bytes
    """uint32, generated since."""
    first_page: int
    pages: list[int]
    """Its pages from index `first_page` on."""
    logprobs: list[TokenLogprob]
    """Of `tokens`, where the request wants them."""
    prompt_logprobs: list[TokenLogprob]
    """Computed since."""


class Ending(NamedTuple):
    """How a sequence ended, beside its last Change."""

    id: int
    finish_reason: str | None
    text: str | None
    error: str | None


class Departure(NamedTuple):
    """MIGRATE, for the leader of the source node: these pages are about to be pulled."""

    sequence: int
    destination: int
    """World rank that pulls."""
    pages: list[int]


class Arrival(NamedTuple):
    """MIGRATE, for the leader of the destination node."""

    state: SequenceState
    """Its `pages` are those of the source node."""
    source: int
    """World rank that exposes them."""
    patience: float
    """Seconds after which it is to be given up."""


@dataclass(slots=True)
class Order:
    """What one rank is to do until the next decision."""

    phase: Phase
    part: RankPlan
    steps: int = 0
    partition: tuple[tuple[int, tuple[int, ...]], ...] = ()
    take_over: list[SequenceState] = field(default_factory=list)
    """Sequences of `part` whose newest state this rank does not have."""
    forget: list[int] = field(default_factory=list)
    """Sequences that other ranks have taken over."""
    cancel: list[int] = field(default_factory=list)
    """Unfinished sequences of this rank that nobody waits for any more."""
    release: list[int] = field(default_factory=list)
    """Pages of this node that belong to nobody any more."""
    departures: list[Departure] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class YieldAll:
    """A side task: YIELD whatever is active, so that all KV is in the host store."""


@dataclass(frozen=True, slots=True)
class SideTask:
    """Something to do between two decisions; the rank answers with what it gives."""

    task: object


class Health(NamedTuple):
    """How a rank is, with every outcome."""

    seconds: float
    """Since its last report."""
    waited: float
    """Seconds of these in which it waited for others."""
    resident: int
    """Bytes of memory that the process has."""
    available: int
    """Bytes of memory that its node has left."""


@dataclass(slots=True)
class Outcome:
    """What one rank did."""

    report: Report
    health: Health
    changes: list[Change] = field(default_factory=list)
    endings: list[Ending] = field(default_factory=list)
    moved: list[tuple[int, list[int]]] = field(default_factory=list)
    """(sequence, its pages on this node) of the MIGRATEs in `report.migrated`."""
    prefill_tokens: int = 0
    decode_tokens: int = 0


def apply_change(sequence: Sequence, change: Change) -> None:
    """Brings rank 0's copy of a sequence up to date."""
    sequence.status, sequence.kv_length = change.status, change.kv_length
    if change.tokens:
        sequence.output.frombytes(change.tokens)
    if change.first_page < len(sequence.pages):
        # Another list, as where the engine takes pages away: whoever copies them sees that they have changed hands.
        sequence.pages = sequence.pages[: change.first_page]
    sequence.pages += change.pages
    if change.logprobs:
        sequence.logprobs += change.logprobs
    if change.prompt_logprobs:
        sequence.prompt_logprobs += change.prompt_logprobs
