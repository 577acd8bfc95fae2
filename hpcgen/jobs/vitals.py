"""What the events of a run say of it now: phase, throughput, where its sequences stand."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpcgen.report.clock import Clock
from hpcgen.report.events import job_spans, read_events, without_overlaps
from hpcgen.report.progress import RATE_WINDOW


@dataclass(slots=True)
class Vitals:
    """Of a run, its earlier, interrupted jobs included, unless it says otherwise."""

    phase: str = ""
    """Of the last job: 'prefill', 'decode', or '' where none is known."""
    spans: list[tuple[float, float]] = field(default_factory=list)
    """When jobs worked, in Unix time."""
    output_tokens: int = 0
    rates: dict[str, float] = field(default_factory=dict)
    """Tokens/s by phase, over the last steps of the last job that make up RATE_WINDOW seconds of that phase."""
    active: list[int] = field(default_factory=list)
    """Sequences that decode, by rank; empty where it is not known, as all that follows."""
    suspended: int = 0
    waiting: int = 0
    kv_shares: list[float] = field(default_factory=list)
    """Share of the host store that KV is in, by node."""

    @classmethod
    def read(cls, events: Path, running: bool = False, now: float | None = None) -> "Vitals":
        """`running`: whether the last job still works, at `now`."""
        vitals = cls()
        recent: dict[str, deque[tuple[int, float]]] = {}
        host_pages = 0
        found = list(read_events(events)) if events.exists() else []
        for event in found:
            kind = event["event"]
            if kind == "opened":
                recent = {}
                vitals.phase, vitals.active, vitals.kv_shares = "", [], []
            vitals.phase = event.get("phase", vitals.phase)
            if kind == "steps":
                if event["phase"] == "decode":
                    vitals.output_tokens += event["tokens"]
                _add(recent.setdefault(event["phase"], deque()), event["tokens"], event["seconds"])
            elif kind == "memory":
                host_pages = event["host_pages"]
            elif kind == "load":
                vitals.active, vitals.suspended, vitals.waiting = event["active"], event["suspended"], event["waiting"]
                vitals.kv_shares = [pages / host_pages for pages in event["host_pages"]] if host_pages else []
        if found and running:
            found.append({"event": "now", "time": time.time() if now is None else now})
        vitals.spans = job_spans(found)
        for phase, steps in recent.items():
            seconds = sum(step[1] for step in steps)
            if seconds > 0:
                vitals.rates[phase] = sum(step[0] for step in steps) / seconds
        return vitals

    @property
    def seconds(self) -> float:
        """Time in which some job worked."""
        return Clock(without_overlaps(self.spans)).seconds

    @classmethod
    def together(cls, instances: Sequence["Vitals"]) -> "Vitals":
        """Of all instances of a run; each has a phase of its own."""
        whole = cls(phase=", ".join(sorted({one.phase for one in instances if one.phase})))
        for one in instances:
            whole.spans += one.spans
            whole.output_tokens += one.output_tokens
            whole.active += one.active
            whole.suspended += one.suspended
            whole.waiting += one.waiting
            whole.kv_shares += one.kv_shares
            for phase, rate in one.rates.items():
                whole.rates[phase] = whole.rates.get(phase, 0.0) + rate
        return whole


def _add(steps: "deque[tuple[int, float]]", tokens: int, seconds: float) -> None:
    """Keeps as many of the last steps as make up RATE_WINDOW."""
    steps.append((tokens, seconds))
    total = sum(step[1] for step in steps)
    while len(steps) > 1 and total - steps[0][1] >= RATE_WINDOW:
        total -= steps.popleft()[1]
