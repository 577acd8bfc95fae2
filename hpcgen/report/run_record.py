"""What a run directory says of its run, gathered for a report; the run may still be at work."""

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hpcgen.batch.journal import scan_lines
from hpcgen.batch.run_directory import Manifest, RunDirectory
from hpcgen.report.events import job_spans, read_events, without_overlaps

_SERIES_EVENTS = {"opened", "phase", "steps", "load", "memory", "plan"}
"""Events that are drawn as curves or tables; all others are marks on the timeline."""


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Body(msgspec.Struct):
    usage: _Usage = msgspec.field(default_factory=_Usage)
    choices: list[_Choice] = []


class _Response(msgspec.Struct):
    body: _Body = msgspec.field(default_factory=_Body)


class _Error(msgspec.Struct):
    code: str = "unknown"
    message: str = ""


class _Line(msgspec.Struct):
    """As much of an output line as a report needs."""

    custom_id: str | None = None
    response: _Response | None = None
    error: _Error | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that has a result or an error."""

    request: int
    custom_id: str
    time: float
    """Unix time."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str = ""
    error_code: str | None = None
    error_message: str = ""


@dataclass(frozen=True, slots=True)
class Clock:
    """Time of work: Unix time without the waits between the jobs of a run."""

    spans: tuple[tuple[float, float], ...]
    """(first, last event) of each job, in order."""

    def __call__(self, moment: float) -> float:
        """Seconds of work before `moment`."""
        return sum(max(0.0, min(stop, moment) - start) for start, stop in self.spans)

    @property
    def seconds(self) -> float:
        return sum(stop - start for start, stop in self.spans)


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    phase: str
    start: float
    """Seconds of work, as all times that are drawn."""
    stop: float


@dataclass(slots=True)
class RunRecord:
    """A run as its files tell it. Curves are arrays over seconds of work."""

    path: Path
    manifest: Manifest
    complete: bool
    clock: Clock
    jobs: list[dict[str, Any]]
    """The opening event of each job."""
    memory: dict[str, Any]
    """The last event that describes the memory; empty where there is none."""
    plan: dict[str, Any]
    """What the planner foresaw; empty where there is no plan."""
    steps: list[dict[str, Any]]
    """Events `steps`, with `at` in seconds of work."""
    loads: list[dict[str, Any]]
    """Events `load`, with `at`."""
    marks: list[tuple[float, str, str]]
    """(at, event, details) of everything else that happened."""
    phases: list[PhaseSpan]
    finished: list[Finished] = field(default_factory=list)
    """In the order of finishing."""

    @classmethod
    def read(cls, path: Path) -> "RunRecord":
        """Raises RunDirectoryError or JournalError where it is no run directory, or its files are damaged."""
        directory = RunDirectory(path)
        manifest = directory.read_manifest()
        parts = [part for part in directory.parts() if part.events_path.exists()]
        streams = [list(read_events(part.events_path)) for part in parts]
        events = sorted((event for stream in streams for event in stream), key=lambda event: event["time"])
        finished = _read_journals(directory)
        clock = _clock(streams, finished, manifest.created)
        by_kind: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for event in events:
            by_kind[event["event"]].append({**event, "at": clock(event["time"])})
        marks = [
            (event["at"], kind, ", ".join(f"{key} {value}" for key, value in event.items() if key not in _ENVELOPE))
            for kind, of_kind in by_kind.items()
            if kind not in _SERIES_EVENTS
            for event in of_kind
        ]
        marks += [(job["at"], "resumed", "") for job in by_kind["opened"][1:]]
        return cls(
            path=path,
            manifest=manifest,
            complete=directory.is_complete,
            clock=clock,
            jobs=by_kind["opened"],
            memory=(by_kind["memory"] or [{}])[-1],
            plan=(by_kind["plan"] or [{}])[-1],
            steps=by_kind["steps"],
            loads=by_kind["load"],
            marks=sorted(marks),
            phases=_phases(by_kind, clock),
            finished=finished,
        )

    @property
    def requests(self) -> int:
        return self.manifest.input.requests

    @property
    def succeeded(self) -> list[Finished]:
        return [one for one in self.finished if one.error_code is None]

    @property
    def errors(self) -> list[tuple[str, list[Finished]]]:
        """Failed requests by code, the most frequent first."""
        groups: dict[str, list[Finished]] = defaultdict(list)
        for one in self.finished:
            if one.error_code is not None:
                groups[one.error_code].append(one)
        return sorted(groups.items(), key=lambda group: -len(group[1]))

    def phase_seconds(self, phase: str) -> float:
        """Time in steps of a phase."""
        return sum(event["seconds"] for event in self.steps if event["phase"] == phase)

    def tokens(self, phase: str) -> int:
        return sum(event["tokens"] for event in self.steps if event["phase"] == phase)

    def completion_times(self) -> np.ndarray:
        """Seconds of work at which each request was finished, in that order."""
        return np.array([self.clock(one.time) for one in self.finished])

    def sub_batch_times(self) -> np.ndarray:
        """SCT of each complete sub-batch, sorted; empty where the batch was not divided."""
        size = self.manifest.options.get("sub_batch")
        if not size:
            return np.zeros(0)
        times = np.full(self.requests, np.nan)
        for one in self.finished:
            times[one.request] = self.clock(one.time)
        last = np.maximum.reduceat(times, np.arange(0, self.requests, size)) if self.requests else times
        return np.sort(last[~np.isnan(last)])


_ENVELOPE = {"event", "time", "at"}


def _clock(streams: list[list[dict[str, Any]]], finished: list[Finished], created: float) -> Clock:
    """From the events of each instance."""
    spans = [span for events in streams for span in job_spans(events)]
    if not spans:
        spans = [(created, max([created, *(one.time for one in finished)]))]
    return Clock(without_overlaps(spans))


def _phases(by_kind: dict[str, list[dict[str, Any]]], clock: Clock) -> list[PhaseSpan]:
    """Phases as spans; one ends where the next begins, or its job ends."""
    starts = [(event["at"], event["phase"]) for event in by_kind["phase"]]
    ends = np.cumsum([stop - start for start, stop in clock.spans]).tolist()
    borders = sorted({*(start for start, _ in starts), *ends})
    spans: list[PhaseSpan] = []
    for start, phase in starts:
        stop = next((border for border in borders if border > start), start)
        if spans and spans[-1].phase == phase and spans[-1].stop >= start:
            spans[-1] = PhaseSpan(phase, spans[-1].start, stop)
        else:
            spans.append(PhaseSpan(phase, start, stop))
    return spans


def _read_journals(directory: RunDirectory) -> list[Finished]:
    decoder = msgspec.json.Decoder(_Line)
    found: dict[int, Finished] = {}
    for journal in [part.journal_path for part in directory.parts() if part.journal_path.exists()]:
        for request, ok, time, payload in scan_lines(journal):
            try:
                line = decoder.decode(payload)
            except msgspec.MsgspecError:
                line = _Line()  # an output line of another version
            name = line.custom_id or f"line {request + 1}"
            if ok:
                body = line.response.body if line.response is not None else _Body()
                reason = body.choices[0].finish_reason if body.choices else None
                usage = body.usage
                found[request] = Finished(
                    request, name, time, usage.prompt_tokens, usage.completion_tokens, reason or ""
                )
            else:
                error = line.error or _Error()
                found[request] = Finished(
                    request, name, time, error_code=error.code, error_message=error.message, finish_reason="error"
                )
    return sorted(found.values(), key=lambda one: one.time)
