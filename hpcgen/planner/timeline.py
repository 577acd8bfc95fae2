"""What happened when on which rank, simulated or measured: one format, which Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcgen.planner.errors import PlanError


@dataclass(frozen=True, slots=True)
class Span:
    """One rank did one thing from `start` to `end`, in seconds."""

    rank: int
    what: str
    start: float
    end: float
    active: int = 0
    """Sequences it worked on."""
    tokens: int = 0


def write_trace(spans: Iterable[Span], file: Path) -> None:
    """As a trace of the Trace Event Format (Google, 2016): complete events, in microseconds."""
    events = [
        {
            "name": span.what,
            "ph": "X",
            "pid": 0,
            "tid": span.rank,
            "ts": span.start * 1e6,
            "dur": (span.end - span.start) * 1e6,
            "args": {"active": span.active, "tokens": span.tokens},
        }
        for span in spans
    ]
    file.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def read_trace(file: Path) -> list[Span]:
    """What `write_trace` wrote. Raises PlanError."""
    try:
        events = json.loads(file.read_text())["traceEvents"]
        return [
            Span(
                rank=event["tid"],
                what=event["name"],
                start=event["ts"] / 1e6,
                end=(event["ts"] + event["dur"]) / 1e6,
                active=event["args"]["active"],
                tokens=event["args"]["tokens"],
            )
            for event in events
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PlanError(f"{file} is not a timeline that hpcgen wrote: {error!r}") from None


def spans_of_events(events: Iterable[dict[str, Any]], rank: int = 0) -> list[Span]:
    """Spans of the events of a run directory (`report/events.py`): each summed-up run of steps is one."""
    spans: list[Span] = []
    origin: float | None = None
    for event in events:
        if origin is None:
            origin = event["time"]
        if event.get("event") == "steps":
            end = event["time"] - origin
            begin = max(end - event["seconds"], 0.0)
            spans.append(Span(rank, event["phase"], begin, end, 0, event["tokens"]))
    return spans
