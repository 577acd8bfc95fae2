"""The charts of a run's report, each with its legend."""

from collections.abc import Sequence
from html import escape

import numpy as np

from hpcgen.report.progress import duration
from hpcgen.report.run_record import RunRecord
from hpcgen.report.svg import Chart, number, time_ticks
from hpcgen.report.timeline import STYLE_OF_PHASE

MOST_LINES = 8
"""Ranks or nodes that get a line of their own; of more, the least, mean and most are drawn."""
_BINS = 24
_PARTS = 150


def completion(record: RunRecord) -> str:
    """Share of requests, and of sub-batches, finished over time."""
    chart = _over_time(record, 100.0, lambda value: f"{value:.0f}%")
    times = record.completion_times()
    legend = [("s1", "requests finished")]
    chart.steps(*_cumulative(times, record.requests, record.clock.seconds), "s1", "requests finished")
    sub_batches = record.sub_batch_times()
    if len(sub_batches):
        count = -(-record.requests // int(record.manifest.options["sub_batch"]))
        chart.steps(*_cumulative(sub_batches, count, record.clock.seconds), "s2", "sub-batches complete")
        legend.append(("s2", "sub-batches complete (SCT)"))
    if planned := record.planned("seconds"):
        chart.moment(planned, "s4", f"the plan: complete after {duration(planned)} at most")
        legend.append(("s4", "complete at the latest, by the plan"))
    return _figure(chart, "Requests and sub-batches finished over time", legend)


def throughput(record: RunRecord) -> str:
    """Tokens per second in the two phases."""
    intervals = {phase: _rates(record, phase) for phase in STYLE_OF_PHASE}
    most = max((rate for found in intervals.values() for *_, rate in found), default=1.0)
    planned = {phase: record.planned(f"{phase}_rate") for phase in intervals}
    chart = _over_time(record, max([most, *(rate for rate in planned.values() if rate)]))
    for phase, found in intervals.items():
        edges = [(start, stop) for start, stop, _ in found]
        chart.stairs(edges, [rate for *_, rate in found], STYLE_OF_PHASE[phase], f"{phase}, tokens/s")
    legend = [("s0", "prefill"), ("s1", "decode")]
    for phase, rate in planned.items():
        if rate:
            chart.level(rate, STYLE_OF_PHASE[phase], f"the plan: {rate:,.0f} tokens/s of {phase}")
    if any(planned.values()):
        legend.append(("dashes", "by the plan"))
    return _figure(chart, "Tokens per second over time", legend)


def _rates(record: RunRecord, phase: str) -> list[tuple[float, float, float]]:
    """(from, to, tokens/s): as recorded, or of several instances together in even parts of the time."""
    found = [
        (max(event["at"] - event["seconds"], 0.0), event["at"], event["tokens"], event["seconds"])
        for event in record.steps
        if event["phase"] == phase and event["seconds"] > 0
    ]
    if len(record.streams) == 1:
        return [(start, stop, tokens / seconds) for start, stop, tokens, seconds in found]
    edges = np.linspace(0.0, record.clock.seconds, _PARTS + 1)
    sums = np.zeros(_PARTS)
    for start, stop, tokens, _ in found:
        overlap = np.clip(np.minimum(edges[1:], stop) - np.maximum(edges[:-1], start), 0.0, None)
        sums += tokens * overlap / max(overlap.sum(), 1e-9)
    width = edges[1] - edges[0]
    return [(edges[i], edges[i + 1], sums[i] / width) for i in np.flatnonzero(sums).tolist()]


def sequences(record: RunRecord) -> str:
    """Sequences that decode, that are suspended, and that wait."""
    at = [load["at"] for load in record.loads]
    totals = {name: [_total(load[name]) for load in record.loads] for name in ("active", "suspended", "waiting")}
    chart = _over_time(record, max(map(max, totals.values())))
    styles = {"active": "s1", "suspended": "s2", "waiting": "s3"}
    for name, values in totals.items():
        chart.line(at, values, styles[name], name)
    return _figure(chart, "Sequences over time", [(style, name) for name, style in styles.items()])


def active_by_rank(record: RunRecord) -> str:
    """Sequences that each rank decodes."""
    return _by_member(record, "active", "rank", None)


def kv_occupancy(record: RunRecord) -> str:
    """Share of each node's host store that KV is in."""
    pages = record.memory.get("host_pages") or 1
    return _by_member(record, "host_pages", "node", 100.0 / pages)


def lengths(record: RunRecord) -> str:
    """Histograms of prompt and output tokens."""
    figures = []
    for name, style in (("prompt_tokens", "s0"), ("output_tokens", "s1")):
        values = np.array([getattr(one, name) for one in record.succeeded])
        counts, edges = np.histogram(values, bins=_BINS, range=(0, max(int(values.max()), _BINS)))
        chart = Chart(float(edges[-1]), float(counts.max()), height=150)
        chart.bars(edges, counts, style, "tokens")
        label = name.replace("_", " ")
        figures.append(_figure(chart, f"Histogram of {label}", [(style, f"requests by {label}")]))
    return f'<div class="pair">{"".join(figures)}</div>'


def _over_time(record: RunRecord, most: float, y_format=number) -> Chart:  # type: ignore[no-untyped-def]
    seconds = record.clock.seconds
    chart = Chart(seconds, most, x_ticks=time_ticks(seconds), x_format=duration, y_format=y_format)
    for span in record.phases:
        chart.band(span.start, span.stop, STYLE_OF_PHASE.get(span.phase, "s3"), span.phase)
    return chart


def _by_member(record: RunRecord, name: str, member: str, percent: float | None) -> str:
    """A line for each rank or node, or the least, mean and most of many. `percent`: factor to a percentage."""
    at = [load["at"] for load in record.loads]
    rows = np.array([load[name] for load in record.loads], dtype=float) * (percent or 1.0)  # [loads, members]
    most = max(float(rows.max()), 1.0)
    chart = _over_time(record, most, (lambda value: f"{value:.3g}%") if percent else number)
    count = rows.shape[1]
    if count <= MOST_LINES:
        legend = [(f"s{index % 6}", f"{member} {index}") for index in range(count)]
        curves = rows.T
    else:
        legend = [("s3", f"least of {count} {member}s"), ("s1", "mean"), ("s2", "most")]
        curves = np.stack([rows.min(axis=1), rows.mean(axis=1), rows.max(axis=1)])
    for (style, label), values in zip(legend, curves, strict=True):
        chart.line(at, values, style, label)
    return _figure(chart, f"{name} by {member} over time", legend)


def _cumulative(times: np.ndarray, count: int, until: float) -> tuple[list[float], list[float]]:
    """Points of the curve of what share of `count` has happened; it starts at 0 and goes on to `until`."""
    shares = (np.arange(len(times)) + 1) * 100.0 / max(count, 1)
    return [0.0, *times.tolist(), until], [0.0, *shares.tolist(), float(shares[-1]) if len(shares) else 0.0]


def _total(value: float | Sequence[float]) -> float:
    return sum(value) if isinstance(value, list) else float(value)  # type: ignore[arg-type]


def _figure(chart: Chart, label: str, legend: list[tuple[str, str]]) -> str:
    keys = "".join(f'<span><i class="key {style}"></i>{escape(text)}</span>' for style, text in legend)
    return f"<figure>{chart.render(label)}<figcaption>{keys}</figcaption></figure>"
