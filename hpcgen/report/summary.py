"""The table at the end of a run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcgen.report.progress import duration

SCT_PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run came to. Times are seconds of computing, those of earlier, interrupted jobs included."""

    requests_ok: int
    requests_failed: int
    prompt_tokens: int
    output_tokens: int
    bct: float
    """Batch completion time: from the start of the run to its last result."""
    prefill_seconds: float
    decode_seconds: float
    peak_memory: int
    """Most bytes of main memory resident at once, all processes of the job."""
    output: Path
    errors: Path
    run_directory: Path
    scts: Sequence[float] = ()
    """Completion times of the sub-batches, from the start of the run; none where the batch was not divided."""
    resumed: int = 0
    """Jobs that were interrupted before this one."""
    checkpoints: int = 0
    """Periodic ones."""
    checkpoint_stall: float = 0.0
    """Seconds that the computation waited for them."""


def percentile(values: Sequence[float], percent: float) -> float:
    """Smallest value that `percent` percent of `values` do not exceed (nearest rank). ValueError without values."""
    if not values:
        raise ValueError("no percentile of nothing")
    return sorted(values)[max(math.ceil(len(values) * percent / 100), 1) - 1]


def render(summary: Summary) -> str:
    """The summary as lines of plain text, names left and values right."""
    rows = [
        ("requests", f"{summary.requests_ok:,} ok, {summary.requests_failed:,} failed"),
        ("prompt tokens", f"{summary.prompt_tokens:,}"),
        ("output tokens", f"{summary.output_tokens:,}"),
        ("batch completion time", f"{duration(summary.bct)} ({summary.bct:,.1f} s)"),
        ("output tokens/s", f"{summary.output_tokens / summary.bct:,.1f}" if summary.bct > 0 else "-"),
    ]
    if summary.scts:
        times = ", ".join(f"p{p} {duration(percentile(summary.scts, p))}" for p in SCT_PERCENTILES)
        rows.append((f"sub-batches ({len(summary.scts):,})", times))
    rows += [
        ("prefill, decode", f"{summary.prefill_seconds:,.1f} s, {summary.decode_seconds:,.1f} s"),
        ("peak memory", f"{summary.peak_memory / 2**30:,.2f} GiB"),
    ]
    if summary.checkpoints:
        share = f" ({summary.checkpoint_stall / summary.bct:.2%})" if summary.bct > 0 else ""
        rows.append(
            ("periodic checkpoints", f"{summary.checkpoints}, waited for {summary.checkpoint_stall:,.2f} s{share}")
        )
    if summary.resumed:
        rows.append(("resumed", f"{summary.resumed} times"))
    rows.append(("results", str(summary.output)))
    if summary.requests_failed:
        rows.append(("errors", str(summary.errors)))
    rows.append(("run directory", str(summary.run_directory)))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
