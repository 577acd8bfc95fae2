"""The timeline of a run: phases, jobs, and what happened, each kind of event in a lane of its own."""

from html import escape

from hpcgen.report.marks import Mark
from hpcgen.report.progress import duration
from hpcgen.report.run_record import RunRecord
from hpcgen.report.stream import Stream
from hpcgen.report.svg import Chart, time_ticks

STYLE_OF_PHASE = {"prefill": "s0", "decode": "s1"}
LANES = {
    "checkpoints": ("s2", ("checkpoint",)),
    "stops": (
        "mark",
        ("stopped", "preempted", "killed", "expired", "cancelled", "checkpoint_failed", "lost", "failure"),
    ),
    "continued": ("s4", ("resumed", "restored")),
    "migrations": ("s5", ("migrations",)),
}
"""Style, and kinds of events."""
_OTHERS = "others"
_LANE_PIXELS = 24
MOST_INSTANCES = 16
"""Of more, only the first have lanes."""
_SHOWN = ("finished",)
"""Kinds that are no lane's: the end of the run is where the timeline ends."""


def timeline(record: RunRecord) -> str:
    """Lanes from top to bottom: phases and jobs, of each instance where several share the run, then events."""
    lanes: list[tuple[str, list[tuple[float, float, str, str]]]] = []
    for stream in record.streams[:MOST_INSTANCES]:
        lanes.append((f"phases of {stream.name}" if stream.name else "phases", _phases(stream)))
        if len(stream.jobs) > 1:
            lanes.append((f"jobs of {stream.name}" if stream.name else "jobs", _jobs(stream)))
    by_lane: dict[str, list[tuple[float, float, str, str]]] = {name: [] for name in (*LANES, _OTHERS)}
    lane_of = {kind: (name, style) for name, (style, kinds) in LANES.items() for kind in kinds}
    for mark in record.marks:
        if mark.kind not in _SHOWN:
            name, style = lane_of.get(mark.kind, (_OTHERS, "s3"))
            by_lane[name].append((mark.start, mark.at, style, _describe(mark)))
    lanes += [(name, marks) for name, marks in by_lane.items() if marks]
    if not lanes:
        return ""
    seconds, count = record.clock.seconds, len(lanes)
    chart = Chart(
        seconds,
        count,
        x_ticks=time_ticks(seconds),
        x_format=duration,
        y_format=lambda value: "",
        height=count * _LANE_PIXELS,
    )
    chart.lanes(count)
    for position, (_, blocks) in enumerate(lanes):
        top = count - position
        for start, stop, style, title in blocks:
            chart.block(start, stop, top - 0.82, top - 0.18, style, title)
    names = "".join(f"<span>{escape(name)}</span>" for name, _ in lanes)
    keys = "".join(f'<span><i class="key {style}"></i>{phase}</span>' for phase, style in STYLE_OF_PHASE.items())
    return (
        f'<figure class="lanes"><div class="names">{names}</div>{chart.render("Phases and events over time")}'
        f"<figcaption>{keys}</figcaption></figure>"
    )


def _phases(stream: Stream) -> list[tuple[float, float, str, str]]:
    return [
        (span.start, span.stop, STYLE_OF_PHASE.get(span.phase, "s3"),
         f"{span.phase}, {duration(span.start)} to {duration(span.stop)}")
        for span in stream.phases
    ]  # fmt: skip


def _jobs(stream: Stream) -> list[tuple[float, float, str, str]]:
    """Alternating in shade, as one may end where the next begins."""
    return [
        (job["at"], job["until"], ("s3", "s3 pale")[number % 2], f"job {number + 1}, {duration(job['worked'])}")
        for number, job in enumerate(stream.jobs)
    ]


def _describe(mark: Mark) -> str:
    return f"{duration(mark.at)} {mark.kind.replace('_', ' ')} {mark.details}".strip()
