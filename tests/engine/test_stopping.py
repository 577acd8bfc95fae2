from array import array
from typing import Any

from hpcgen.engine.stopping import Stopping
from hpcgen.sequence import SamplingParams, Sequence


class Letters:
    """A matcher whose tokens are characters."""

    def __init__(self, sequence: Sequence):
        self.stop, self.seen, self.text = sequence.sampling.stop, "", None

    def push(self, token: int) -> bool:
        self.seen += chr(token)
        for stop in self.stop:
            if self.seen.endswith(stop):
                self.text = self.seen[: -len(stop)]
                return True
        return False


def end_of(text: str, output: str = "", **options: Any) -> tuple[str | None, str | None, int]:
    """(finish reason, text, tokens) after the tokens of `text`."""
    options = {"max_tokens": 10} | options
    sequence = Sequence(0, 0, 0, array("I", [0]), SamplingParams(**options), array("I", map(ord, output)))
    stopping = Stopping(Letters)
    for character in text:
        if stopping.append(sequence, ord(character)):
            break
    return sequence.finish_reason, sequence.text, len(sequence.output)


def test_a_stop_token_ends_a_sequence() -> None:
    assert end_of("abcd", stop_token_ids=(ord("c"),)) == ("stop", None, 3)


def test_a_stop_token_does_not_end_it_before_the_least_number_of_tokens() -> None:
    assert end_of("abcbb", stop_token_ids=(ord("b"),), min_tokens=3) == ("stop", None, 4)


def test_length_ends_a_sequence() -> None:
    assert end_of("abcdef", max_tokens=4) == ("length", None, 4)


def test_a_stop_string_cuts_the_text_before_it() -> None:
    assert end_of("hello, world", stop=("lo,", "zzz")) == ("stop", "hel", 6)


def test_a_stop_by_the_last_allowed_token_is_a_stop() -> None:
    assert end_of("abc", max_tokens=3, stop_token_ids=(ord("c"),))[0] == "stop"


def test_a_resumed_sequence_finds_a_stop_string_that_began_before() -> None:
    assert end_of("d!", output="en", stop=("end",)) == ("stop", "", 3)
