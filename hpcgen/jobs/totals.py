"""Sums over a whole run, the parts that earlier, interrupted jobs did included."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from hpcgen.batch.journal import Records
from hpcgen.report.events import read_events


class TokenTotals(NamedTuple):
    prompt: int
    output: int


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Body(msgspec.Struct):
    usage: _Usage


class _Response(msgspec.Struct):
    body: _Body


class _Line(msgspec.Struct):
    """As much of an output line as the totals need."""

    response: _Response


def token_totals(journal: Records) -> TokenTotals:
    """Tokens of all requests that have a result."""
    decoder = msgspec.json.Decoder(_Line)
    prompt = output = 0
    for request in np.flatnonzero((journal.offsets >= 0) & journal.ok):
        usage = decoder.decode(journal.line(int(request))).response.body.usage
        prompt += usage.prompt_tokens
        output += usage.completion_tokens
    return TokenTotals(prompt, output)


@dataclass(frozen=True, slots=True)
class CheckpointCost:
    """What periodic checkpoints took from the computation."""

    count: int
    stall: float
    """Seconds that the computation waited for them, which are written beside it: of the instance that waited most."""

    @classmethod
    def read(cls, event_files: Iterable[Path]) -> "CheckpointCost":
        """From the events of each instance."""
        count, most = 0, 0.0
        for events in event_files:
            saved = (
                (event for event in read_events(events) if event["event"] == "checkpoint") if events.exists() else ()
            )
            periodic = [stall for event in saved if (stall := event.get("stall")) is not None]
            count, most = count + len(periodic), max(most, sum(periodic))
        return cls(count, most)
