"""What happened in a run, as marks on its timeline: events that are no curve, and what follows from others."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpcgen.report.progress import duration

_SERIES_EVENTS = {"opened", "phase", "steps", "load", "memory", "plan"}
"""Events that are drawn as curves or tables; all others are marks on the timeline."""
_ENVELOPE = {"event", "time", "at"}
_LAST_WORDS = ("stopped", "preempted", "finished", "expired", "cancelled")
"""Events that a job writes before it ends; one without was killed."""


@dataclass(frozen=True, slots=True, order=True)
class Mark:
    """Something that happened."""

    at: float
    """When it was over, as it is an event's time."""
    kind: str
    details: str = ""
    seconds: float = 0.0
    """How long it took."""

    @property
    def start(self) -> float:
        return max(self.at - self.seconds, 0.0)


def marks_of(events: Sequence[dict[str, Any]], spans: Sequence[tuple[float, float]], instance: str) -> list[Mark]:
    """All marks of an instance, by time.

    Args:
        events: in their order, with `at` in seconds of work.
        spans: first and last event of each job, in Unix time.
        instance: named in the details where several share the run.
    """
    marks = [
        Mark(event["at"], event["event"], _details(event), float(event.get("seconds", 0.0)))
        for event in events
        if event["event"] not in _SERIES_EVENTS
    ]
    marks += [*_ends_of_jobs(events, spans), *_migrations([event for event in events if event["event"] == "load"])]
    if instance:
        marks = [replace(mark, details=f"{instance}: {mark.details}".removesuffix(": ")) for mark in marks]
    return sorted(marks)


def _details(event: dict[str, Any]) -> str:
    """'bytes 12,345,678' becomes '12.3 MB'; other fields are named."""
    parts = []
    for key, value in event.items():
        if key == "bytes" and isinstance(value, int):
            parts.append(f"{value / 1e6:,.1f} MB")
        elif key == "seconds":
            parts.append(f"{value:,.2f} s")
        elif key not in _ENVELOPE and value is not None:
            name = key.replace("_", " ")
            parts.append(f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}")
    return ", ".join(parts)


def _ends_of_jobs(events: Sequence[dict[str, Any]], spans: Sequence[tuple[float, float]]) -> list[Mark]:
    """Where a job went on after another, how long nobody worked, and whether the other said that it leaves."""
    marks, last, at, number = [], "", 0.0, -1
    for event in events:
        if event["event"] == "opened":
            number += 1
            if number:
                if last not in _LAST_WORDS:
                    marks.append(Mark(at, "killed", "no word before the end of the job"))
                waited = spans[number][0] - spans[number - 1][1]
                marks.append(Mark(event["at"], "resumed", f"after {duration(waited)}"))
        elif number >= 0:
            at, last = event["at"], event["event"]
    return marks


def _migrations(loads: Sequence[dict[str, Any]]) -> list[Mark]:
    """From the count that grows from load to load."""
    marks, before, since = [], 0, 0.0
    for load in loads:
        count = load.get("migrated") or 0
        if count > before:
            found = count - before
            marks.append(Mark(load["at"], "migrations", f"{found:,} sequences", max(load["at"] - since, 0.0)))
        before, since = count, load["at"]
    return marks
