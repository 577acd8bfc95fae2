"""A sequence: one sample of one request, and all that is needed to suspend it, move it and resume it."""

from array import array
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from hpcgen.sequence.sampling import SamplingParams

PAGE_TOKENS = 64
"""Tokens in a page of KV. A page holds all layers, so that MIGRATE and a checkpoint move whole pages."""


def pages_for(tokens: int) -> int:
    """Pages that `tokens` tokens of KV occupy."""
    return -(-tokens // PAGE_TOKENS)


class Status(Enum):
    """Where a sequence is in its life (paper §4: the states between which the primitives move it)."""

    WAITING = auto()
    """Has no KV, or lost it: needs prefill."""
    PREFILLING = auto()
    """Some of its prompt has KV."""
    SUSPENDED = auto()
    """YIELDed: all its KV is in the host store, none on a device."""
    ACTIVE = auto()
    """Decoding on a device."""
    FINISHED = auto()
    FAILED = auto()


class TokenLogprob(NamedTuple):
    """Log-probability of a chosen token, and of the most likely ones in falling order."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one sequence. The tokens are the truth; KV can always be recomputed from them.

    After prefill, and between decode steps, KV exists for every token but the last:
    `kv_length == length - 1`. The next step computes the last token's KV and samples one more.
    """

    id: int
    """Unique in the run and rising with arrival: the FIFO key."""
    request: int
    """Position of its request in the input, from 0."""
    sample: int
    """Which of the request's `n` samples, from 0."""
    prompt: array  # of unsigned 32-bit 'I'
    sampling: SamplingParams
    output: array = field(default_factory=lambda: array("I"))
    status: Status = Status.WAITING
    kv_length: int = 0
    """Tokens whose KV is stored, from the first on."""
    pages: list[int] = field(default_factory=list)
    """Pages in the host store of the node that owns the sequence; page i holds tokens [64 i, 64 i + 64)."""
    finish_reason: str | None = None
    """'stop' or 'length'."""
    text: str | None = None
    """Text up to a stop string, where one ended the sequence; else None, and the text is that of `output`."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of the prompt's tokens from position `sampling.prompt_logprobs_start` on, as far as they are computed."""
    error: str | None = None
    """Why it FAILED, for the user."""

    @property
    def length(self) -> int:
        """Tokens known so far."""
        return len(self.prompt) + len(self.output)

    @property
    def prefill_target(self) -> int:
        """Tokens whose KV must exist before it can decode: the prompt, and all that was generated but the last."""
        return len(self.prompt) + max(len(self.output) - 1, 0)

    @property
    def max_length(self) -> int:
        """Most tokens whose KV it can come to need."""
        return len(self.prompt) + self.sampling.max_tokens - 1

    def tokens(self, start: int, stop: int) -> array:
        """Token ids at positions [start, stop)."""
        n = len(self.prompt)
        if stop <= n:
            return self.prompt[start:stop]
        if start >= n:
            return self.output[start - n : stop - n]
        return self.prompt[start:] + self.output[: stop - n]
