"""What one instance recorded of a run, and the instances of a run together."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpcgen.report.clock import Clock
from hpcgen.report.events import job_spans, read_events
from hpcgen.report.marks import Mark, marks_of

_MOST_LOADS = 1000
"""Points in time at which the loads of several instances are added up."""


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    phase: str
    start: float
    """Seconds of work, as all times that are drawn."""
    stop: float


@dataclass(frozen=True, slots=True)
class Stream:
    """The events of one instance, or of a run that no instances share."""

    name: str
    """Of the instance; empty where there is only the run."""
    events: list[dict[str, Any]]
    """With `at`, in seconds of work of the run."""
    jobs: list[dict[str, Any]]
    """The opening event of each job, with `worked`, its seconds, and `until`, when it was over, as `at`."""
    marks: list[Mark]

    @classmethod
    def read(cls, name: str, path: Path, clock: Clock) -> "Stream":
        events = [{**event, "at": clock(event["time"])} for event in read_events(path)]
        spans = job_spans(events)
        opened = [event for event in events if event["event"] == "opened"]
        jobs = [
            {**job, "worked": stop - start, "until": clock(stop)}
            | ({"instance": name} if name else {})
            for job, (start, stop) in zip(opened, spans, strict=True)
        ]  # fmt: skip
        return cls(name, events, jobs, marks_of(events, spans, name))

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]

    @property
    def phases(self) -> list[PhaseSpan]:
        """One ends where the next begins, or its job ends."""
        starts = [(event["at"], event["phase"]) for event in self.of("phase")]
        borders = sorted({*(start for start, _ in starts), *(job["until"] for job in self.jobs)})
        spans: list[PhaseSpan] = []
        for start, phase in starts:
            stop = next((border for border in borders if border > start), start)
            if spans and spans[-1].phase == phase and spans[-1].stop >= start:
                spans[-1] = PhaseSpan(phase, spans[-1].start, stop)
            else:
                spans.append(PhaseSpan(phase, start, stop))
        return spans


def combined_loads(streams: Sequence[Stream]) -> list[dict[str, Any]]:
    """Loads of all instances at common times: ranks and nodes side by side, sequences added up."""
    if len(streams) == 1:
        return streams[0].of("load")
    loads = [(stream, stream.of("load")) for stream in streams]
    loads = [(stream, found) for stream, found in loads if found]
    times = np.unique([load["at"] for _, found in loads for load in found])
    if len(times) > _MOST_LOADS:
        times = times[np.unique(np.linspace(0, len(times) - 1, _MOST_LOADS).astype(int))]
    return [_combined(at, [_load_at(stream, found, at) for stream, found in loads]) for at in times.tolist()]


def _load_at(stream: Stream, loads: list[dict[str, Any]], at: float) -> dict[str, Any]:
    """The last load of the job that works at a time; nothing where none does."""
    position = int(np.searchsorted([load["at"] for load in loads], at, side="right")) - 1
    begun = [job["at"] for job in stream.jobs if job["at"] <= at <= job["until"]]
    if position >= 0 and begun and loads[position]["at"] >= begun[-1]:
        return loads[position]
    first = loads[0]
    return {"active": [0] * len(first["active"]), "suspended": 0, "waiting": 0,
            "host_pages": [0] * len(first["host_pages"])}  # fmt: skip


def _combined(at: float, loads: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "at": at,
        "active": [count for load in loads for count in load["active"]],
        "suspended": sum(load["suspended"] for load in loads),
        "waiting": sum(load["waiting"] for load in loads),
        "host_pages": [pages for load in loads for pages in load["host_pages"]],
    }
