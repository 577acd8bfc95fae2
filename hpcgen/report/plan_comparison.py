"""The plan of a run against what happened."""

from typing import Any

from hpcgen.report.progress import duration
from hpcgen.report.run_record import RunRecord

_FORESEEN = ("seconds", "prefill_seconds", "decode_seconds", "tail_seconds", "prefill_rate", "decode_rate")
_ENVELOPE = ("event", "time", "at")


def compared(record: RunRecord) -> list[tuple[str, str, str, float]]:
    """(what, planned, happened, happened / planned) of each number that the plan has and the run knows."""
    decode = record.planned("decode_seconds")
    if decode is not None:  # the tail is decode too
        decode += record.planned("tail_seconds") or 0.0
    times = [
        ("batch completion", record.planned("seconds"), record.clock.seconds if record.complete else None),
        ("prefill", record.planned("prefill_seconds"), record.phase_seconds("prefill")),
        ("decode", decode, record.phase_seconds("decode")),
    ]
    rows = [
        (name, duration(planned), duration(happened), happened / planned)
        for name, planned, happened in times
        if planned and happened
    ]
    for phase in ("prefill", "decode"):
        planned, seconds = record.planned(f"{phase}_rate"), record.phase_seconds(phase)
        if planned and seconds:
            rate = record.tokens(phase) / seconds
            rows.append((f"{phase}, tokens/s", f"{planned:,.0f}", f"{rate:,.0f}", rate / planned))
    return rows


def chosen(record: RunRecord) -> list[tuple[str, str]]:
    """What the plan decided, such as batch sizes: everything in it that is no forecast."""
    return _flat({name: value for name, value in record.plan.items() if name not in (*_FORESEEN, *_ENVELOPE)})


def _flat(fields: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for name, value in fields.items():
        label = f"{prefix}{name}".replace("_", " ")
        if isinstance(value, dict):
            found += _flat(value, f"{label}, ")
        elif value is not None:
            found.append((label, _text(name, value)))
    return found


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        if name.endswith("bytes"):
            return f"{value / 2**30:,.2f} GiB"
        return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def bar(ratio: float) -> str:
    """How far `happened / planned` is from 1, as a bar that begins in the middle; it ends at half and at twice."""
    share = min(max(ratio, 0.5), 2.0)
    share = (share - 1) / 2 if share >= 1 else share - 1  # -0.5 .. 0.5
    left, width = (50.0, share * 100) if share >= 0 else (50 + share * 100, -share * 100)
    return f'<span class="ratio"><i style="left:{left:.1f}%;width:{max(width, 1):.1f}%"></i></span>{ratio:.2f}'
