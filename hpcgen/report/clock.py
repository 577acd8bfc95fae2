"""Time of work: that of a run without the waits between its jobs."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hpcgen.report.events import job_spans, without_overlaps


@dataclass(frozen=True, slots=True)
class Clock:
    """Time of work: Unix time without the waits in which no job of a run works."""

    spans: tuple[tuple[float, float], ...]
    """When at least one job worked, in order."""

    @classmethod
    def of(cls, streams: Iterable[Iterable[dict[str, Any]]]) -> "Clock":
        """Of the events of each instance; without any there are no spans."""
        return cls(without_overlaps(span for events in streams for span in job_spans(events)))

    def __call__(self, moment: float) -> float:
        """Seconds of work before `moment`."""
        return sum(max(0.0, min(stop, moment) - start) for start, stop in self.spans)

    @property
    def seconds(self) -> float:
        return sum(stop - start for start, stop in self.spans)
