"""When a sequence ends: a stop token, a stop string, or its length."""

from collections.abc import Callable
from typing import Protocol

from hpcgen.sequence import Sequence


class StopMatcher(Protocol):
    """Looks for stop strings in the text of one sequence as it grows; `batch.detokenization` has one."""

    def push(self, token: int) -> bool:
        """Adds a token; whether a stop string is now complete, and may end the sequence."""

    @property
    def text(self) -> str | None:
        """The text before the stop string, once it is complete."""


StopMatcherFactory = Callable[[Sequence], StopMatcher]


class Stopping:
    """Appends sampled tokens and tells which sequences end with them."""

    def __init__(self, matcher: StopMatcherFactory):
        self._matcher = matcher
        self._matchers: dict[int, StopMatcher] = {}

    def append(self, sequence: Sequence, token: int) -> bool:
        """Adds the token to the output. True if the sequence ends with it; it has a `finish_reason` or `error` then."""
        sampling, output = sequence.sampling, sequence.output
        output.append(token)
        matched = bool(sampling.stop) and self._matches(sequence, token)
        if matched:
            sequence.finish_reason = "stop"
            sequence.text = self._matchers[sequence.id].text
        elif token in sampling.stop_token_ids and len(output) >= sampling.min_tokens:
            sequence.finish_reason = "stop"
        elif len(output) >= sampling.max_tokens:
            sequence.finish_reason = "length"
        if sequence.finish_reason is None and sequence.error is None:
            return False
        self._matchers.pop(sequence.id, None)
        return True

    def forget(self, sequence: Sequence) -> None:
        """Nothing more will be appended to the sequence."""
        self._matchers.pop(sequence.id, None)

    def _matches(self, sequence: Sequence, token: int) -> bool:
        matcher = self._matchers.get(sequence.id)
        if matcher is None:
            # A resumed sequence brings tokens that its matcher has not seen.
            matcher = self._matchers[sequence.id] = self._matcher(sequence)
            for earlier in sequence.output[:-1]:
                matcher.push(earlier)
        return matcher.push(token)
