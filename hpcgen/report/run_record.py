"""What a run directory says of its run, gathered for a report; the run may still be at work."""

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hpcgen.batch.journal import scan_lines
from hpcgen.batch.run_directory import Manifest, RunDirectory
from hpcgen.report.clock import Clock
from hpcgen.report.events import read_events
from hpcgen.report.marks import Mark
from hpcgen.report.stream import PhaseSpan, Stream, combined_loads


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


@dataclass(slots=True)
class RunRecord:
    """A run as its files tell it. Curves are arrays over seconds of work."""

    path: Path
    manifest: Manifest
    complete: bool
    clock: Clock
    streams: list[Stream]
    """What each instance recorded; one of a run that no instances share."""
    memory: dict[str, Any]
    """The last event that describes the memory; empty where there is none."""
    plan: dict[str, Any]
    """What the planner foresaw; empty where there is no plan."""
    steps: list[dict[str, Any]]
    """Events `steps`, with `at` in seconds of work."""
    loads: list[dict[str, Any]]
    """Events `load`, with `at`, of all instances together."""
    marks: list[Mark]
    """Everything else that happened, by time."""
    finished: list[Finished] = field(default_factory=list)
    """In the order of finishing."""

    @classmethod
    def read(cls, path: Path) -> "RunRecord":
        """Raises RunDirectoryError or JournalError where it is no run directory, or its files are damaged."""
        directory = RunDirectory(path)
        manifest = directory.read_manifest()
        finished = _read_journals(directory)
        parts = [part for part in directory.parts() if part.events_path.exists()]
        clock = Clock.of(read_events(part.events_path) for part in parts)
        if not clock.spans:
            clock = Clock(((manifest.created, max([manifest.created, *(one.time for one in finished)])),))
        streams = [Stream.read(part.instance or "", part.events_path, clock) for part in parts]
        return cls(
            path=path,
            manifest=manifest,
            complete=directory.is_complete,
            clock=clock,
            streams=streams,
            memory=_last(streams, "memory"),
            plan=_last(streams, "plan"),
            steps=sorted((event for stream in streams for event in stream.of("steps")), key=lambda event: event["at"]),
            loads=combined_loads(streams),
            marks=sorted(mark for stream in streams for mark in stream.marks),
            finished=finished,
        )

    @property
    def jobs(self) -> list[dict[str, Any]]:
        """The opening event of each job, with `worked`, its seconds."""
        return sorted((job for stream in self.streams for job in stream.jobs), key=lambda job: job["time"])

    @property
    def phases(self) -> list[PhaseSpan]:
        """Of a run of one instance; several have phases of their own."""
        return self.streams[0].phases if len(self.streams) == 1 else []

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

    def planned(self, name: str) -> float | None:
        """A number of the plan; None where it has none, or 0."""
        value = self.plan.get(name)
        return float(value) if isinstance(value, int | float) and value else None

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


def _last(streams: list[Stream], kind: str) -> dict[str, Any]:
    """The newest event of a kind; empty where there is none."""
    found = [event for stream in streams for event in stream.of(kind)]
    return max(found, key=lambda event: event["time"], default={})


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
