"""What happened when on which rank, simulated or measured: one format, which Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
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


def write_timeline(spans: Sequence[Span], file: Path) -> None:
    """A trace (.json) or a picture, by the suffix. Raises PlanError."""
    if file.suffix == ".json":
        write_trace(spans, file)
        return
    from hpcgen.planner.pictures import draw_timeline

    draw_timeline(spans, file)


def write_trace(spans: Sequence[Span], file: Path) -> None:
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
    names = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}
        for rank in sorted({span.rank for span in spans})
    ]
    try:
        file.write_text(json.dumps({"traceEvents": names + events, "displayTimeUnit": "ms"}))
    except OSError as error:
        raise PlanError(f"{file} cannot be written: {error.strerror}") from None


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
            if event["ph"] == "X"
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PlanError(f"{file} is not a timeline that hpcgen wrote: {error!r}") from None


def spans_of_events(events: Iterable[dict[str, Any]]) -> list[Span]:
    """Spans of the events of a run directory (`report/events.py`): each summed-up run of steps is one on every rank.

    Tokens are those of all ranks, divided evenly; how many sequences a rank had is as last recorded.
    """
    spans: list[Span] = []
    origin: float | None = None
    active = [0]
    for event in events:
        if origin is None:
            origin = event["time"]
        if event.get("event") == "opened":
            active = [0] * event.get("ranks", 1)
        elif event.get("event") == "load":
            active = event["active"]
        elif event.get("event") == "steps":
            end = event["time"] - origin
            begin = max(end - event["seconds"], 0.0)
            tokens = event["tokens"] // len(active)
            spans += [Span(rank, event["phase"], begin, end, count, tokens) for rank, count in enumerate(active)]
    return spans
