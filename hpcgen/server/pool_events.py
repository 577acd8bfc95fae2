"""Events of the batches of a pool: what the shared engine does stands in the event file of every batch in it."""

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpcgen.engine.executor import Activity
from hpcgen.report.events import EventLog
from hpcgen.scheduler.plan import Load

LOAD_SECONDS = 2.0
"""Between two records of where the sequences stand."""
_log = logging.getLogger(__name__)


class PoolEvents:
    """Event files of batches; `advanced` is for the engine, to be called after every wave and step."""

    def __init__(self, place: Mapping[str, Any] | None = None) -> None:
        """`place`: fields of each file's opening event, where the engine runs."""
        self.place = dict(place or {})
        self.memory: dict[str, Any] = {}
        """Fields of the event `memory`."""
        self._logs: dict[str, EventLog] = {}
        self._tokens = 0
        self._since = time.perf_counter()
        self._next_load = 0.0

    def open(self, id: str, path: Path, requests: int) -> None:
        """A batch begins or goes on."""
        try:
            log = EventLog(path, requests=requests, engine="shared with other batches", **self.place)
        except OSError as error:  # the disk is full, say: the batch matters more
            _log.error("%s has no events: %s", id, error.strerror)
            return
        if self.memory:
            log.write("memory", **self.memory)
        self._logs[id] = log

    def close(self, id: str, event: str, **fields: Any) -> None:
        """A batch leaves the engine, with a last event."""
        log = self._logs.pop(id, None)
        if log is not None:
            log.write(event, **fields)
            log.close()

    def write(self, id: str, event: str, **fields: Any) -> None:
        if id in self._logs:
            self._logs[id].write(event, **fields)

    def resting(self) -> None:
        """The engine has nothing to do: the time until its next step is no step's."""
        self._since = time.perf_counter()

    def advanced(self, activity: Activity) -> None:
        now, tokens = time.perf_counter(), activity.prefill_tokens + activity.decode_tokens
        for log in self._logs.values():
            log.step(activity.phase.value, tokens - self._tokens, now - self._since)
        self._tokens, self._since = tokens, now

    def load(self, load: Load, migrated: int) -> None:
        """Where the sequences of all batches stand, and how many have moved so far; recorded now and then."""
        now = time.perf_counter()
        if now >= self._next_load:
            self._next_load = now + LOAD_SECONDS
            for log in self._logs.values():
                log.write("load", **asdict(load), migrated=migrated)
