"""The events of a run, append-only: what happened when, for reports and for whoever wonders afterwards.

A JSON object a line. Each job of a run opens with an `opened` event that carries the version of the format:

    {"event":"opened","time":1796079000.1,"version":1,...}
    {"event":"phase","time":...,"phase":"prefill"}
    {"event":"plan","time":...,"source":"profile of 2026-12-01","seconds":81.4,"expert_batch":8192,...}
    {"event":"steps","time":...,"phase":"decode","steps":64,"tokens":32768,"seconds":9.8}

`time` is in seconds since the epoch. Steps are summed up, so that a run of hours stays a small file.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

VERSION = 1


class EventLog:
    """Writer of one event file; one process of a run has it open.

    Events lie in a buffer until `interval` seconds have passed, `flush` or `close`: they inform, and recovery never
    reads them. A disk that is full loses events, not the run.
    """

    def __init__(
        self, path: Path, *, interval: float = 5.0, clock: Callable[[], float] = time.time, **opened: Any
    ) -> None:
        """`opened`: further fields of the opening event. Raises OSError where the file cannot be opened."""
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._interval = interval
        self._clock = clock
        self._buffer: list[bytes] = []
        self._flushed = clock()
        self._phase = ""
        self._steps = self._tokens = 0
        self._seconds = self._last_step = 0.0
        self._torn = _lacks_newline(path)
        self.write("opened", version=VERSION, **opened)
        self.flush()

    def write(self, event: str, **fields: Any) -> None:
        """Records an event; `fields` are what JSON can say."""
        self._record_steps()
        self._append(event, fields)
        self._flush_if_due()

    def step(self, phase: str, tokens: int, seconds: float) -> None:
        """Counts one step of `tokens` tokens; a change of the phase is an event, at that step's beginning."""
        if phase != self._phase:
            self._record_steps()
            self._phase = phase
            self._append("phase", {"phase": phase}, self._clock() - seconds)
            self._write_out()  # whoever watches the run sees the switch at once
        self._steps += 1
        self._last_step = self._clock()
        self._tokens += tokens
        self._seconds += seconds
        self._flush_if_due()

    def flush(self) -> None:
        self._record_steps()
        self._flushed = self._clock()
        self._write_out()

    def _write_out(self) -> None:
        data, self._buffer = b"".join(self._buffer), []
        if not data:
            return
        if self._torn:
            data = b"\n" + data
        try:
            self._torn = os.write(self._file, data) < len(data)
        except OSError:
            self._torn = True

    def close(self) -> None:
        self.flush()
        os.close(self._file)

    def __enter__(self) -> "EventLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, event: str, fields: dict[str, Any], time: float | None = None) -> None:
        time = round(self._clock() if time is None else time, 3)
        self._buffer.append(msgspec.json.encode({"event": event, "time": time, **fields}) + b"\n")

    def _record_steps(self) -> None:
        if self._steps:
            fields = {
                "phase": self._phase,
                "steps": self._steps,
                "tokens": self._tokens,
                "seconds": round(self._seconds, 4),
            }
            self._append("steps", fields, self._last_step)
            self._steps = self._tokens = 0
            self._seconds = 0.0

    def _flush_if_due(self) -> None:
        if self._clock() - self._flushed >= self._interval:
            self.flush()


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Events of a file in their order; lines that a crash or a full disk tore are left out."""
    with open(path, "rb") as file:
        for line in file:
            try:
                event = msgspec.json.decode(line)
            except msgspec.DecodeError:
                continue
            if isinstance(event, dict) and "event" in event:
                yield event


def job_spans(events: Iterable[dict[str, Any]]) -> list[tuple[float, float]]:
    """(first, last event) of each job in a stream of events, in Unix time."""
    spans: list[tuple[float, float]] = []
    for event in events:
        if event["event"] == "opened":
            spans.append((event["time"], event["time"]))
        elif spans:
            spans[-1] = (spans[-1][0], max(event["time"], spans[-1][1]))
    return spans


def without_overlaps(spans: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """The same time in separate spans, in order: instances work side by side."""
    merged: list[tuple[float, float]] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


def _lacks_newline(path: Path) -> bool:
    """Whether a killed writer left half a line at the end."""
    with open(path, "rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
