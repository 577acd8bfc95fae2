"""Sums over a whole run, the parts that earlier, interrupted jobs did included."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from hpcgen.batch.journal import Journal
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


def token_totals(journal: Journal) -> TokenTotals:
    """Tokens of all requests that have a result."""
    decoder = msgspec.json.Decoder(_Line)
    prompt = output = 0
    for request in np.flatnonzero((journal.offsets >= 0) & journal.ok):
        usage = decoder.decode(journal.line(int(request))).response.body.usage
        prompt += usage.prompt_tokens
        output += usage.completion_tokens
    return TokenTotals(prompt, output)


@dataclass(frozen=True, slots=True)
class JobTimes:
    """When the jobs of a run worked: (first, last event) of each in Unix time, in their order."""

    spans: tuple[tuple[float, float], ...]

    @classmethod
    def read(cls, events: Path) -> "JobTimes":
        spans: list[tuple[float, float]] = []
        for event in read_events(events):
            if event["event"] == "opened":
                spans.append((event["time"], event["time"]))
            elif spans:
                spans[-1] = (spans[-1][0], event["time"])
        return cls(tuple(spans))

    @property
    def count(self) -> int:
        return len(self.spans)

    @property
    def seconds(self) -> float:
        """Time in which some job worked: the batch completion time without the waits between jobs."""
        return sum(stop - start for start, stop in self.spans)

    def since_start(self, times: Sequence[float | None]) -> list[float]:
        """Unix times as seconds of work since the first job began; what has not happened is left out."""
        return [
            sum(max(0.0, min(stop, moment) - start) for start, stop in self.spans)
            for moment in times
            if moment is not None
        ]


@dataclass(frozen=True, slots=True)
class CheckpointCost:
    """What periodic checkpoints took from the computation."""

    count: int
    stall: float
    """Seconds that the computation waited for them; they are written beside it."""

    @classmethod
    def read(cls, events: Path) -> "CheckpointCost":
        stalls = [event.get("stall") for event in read_events(events) if event["event"] == "checkpoint"]
        periodic = [stall for stall in stalls if stall is not None]
        return cls(len(periodic), sum(periodic))
