"""Pictures for papers and reports: timeline by rank, roofline with the chosen batches, completion time against nodes,
critical path of a layer. PNG or SVG, by the suffix of the file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpcgen.planner import work
from hpcgen.planner.costs import Costs
from hpcgen.planner.errors import PlanError
from hpcgen.planner.explain import sweeps
from hpcgen.planner.roofline import Roofline, Work
from hpcgen.planner.search import Choice
from hpcgen.planner.sweep import COMPUTE, FETCH, NETWORK, WRITE, Sweep
from hpcgen.planner.timeline import Span
from hpcgen.planner.workload import Workload

COLOURS = {
    "prefill": "#4477aa",
    "decode": "#ee6677",
    "attention": "#4477aa",
    "experts": "#66ccee",
    "dense MLP": "#66ccee",
    "dispatch": "#aa3377",
    "combine": "#ee6677",
    "fetch": "#ccbb44",
    "KV restore": "#bbbbbb",
    "KV write": "#228833",
}
"""Of phases, and of kinds of work (Paul Tol's bright scheme, which the colour-blind can tell apart)."""


def draw_timeline(spans: Sequence[Span], file: Path) -> None:
    """A row for each rank: what it did when; the height of a bar is the share of the most active sequences."""
    figure, axes = _figure(7.0, 3.2)
    ranks = sorted({span.rank for span in spans})
    row = {rank: index for index, rank in enumerate(ranks)}
    most = max((span.active for span in spans), default=0) or 1
    for what in ("prefill", "decode"):
        chosen = [span for span in spans if span.what == what]
        heights = [0.8 if what == "prefill" else 0.1 + 0.7 * span.active / most for span in chosen]
        axes.bar(
            [span.start for span in chosen],
            heights,
            width=[span.end - span.start for span in chosen],
            bottom=[row[span.rank] - 0.4 for span in chosen],
            align="edge",
            color=COLOURS[what],
            label=what,
            linewidth=0,
        )
    axes.set(xlabel="time, s", ylabel="rank", yticks=list(row.values())[:: max(len(ranks) // 16, 1)])
    axes.set_yticklabels([str(rank) for rank in ranks][:: max(len(ranks) // 16, 1)])
    axes.set_ylim(-0.5, len(ranks) - 0.5)
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False)
    _save(figure, file)


def draw_roofline(costs: Costs, choice: Choice, workload: Workload, file: Path) -> None:
    """The roofs of the kernels, and on them where the chosen batches work."""
    figure, axes = _figure(4.5, 3.4)
    intensity = np.geomspace(0.5, 1e5, 200)
    roofs: dict[str, Roofline] = {"dense": costs.linear, "experts": costs.experts, "attention": costs.decode_attention}
    together: dict[tuple[float, float], list[str]] = {}
    for name, roof in roofs.items():
        together.setdefault((roof.flops_per_second, roof.bytes_per_second), []).append(name)
    for ((flops, nbytes), names), style in zip(together.items(), ("-", "--", ":"), strict=False):
        heights = np.minimum(flops, intensity * nbytes)
        axes.plot(intensity, heights, style, color="k", label=f"roof: {', '.join(names)}")
    shape, found, configuration = costs.shape, choice.estimate, choice.configuration
    tokens = configuration.prefill.expert_batch
    batch = found.active
    points: dict[str, tuple[Work, Roofline]] = {
        "projections, prefill": (work.projections(shape, configuration.prefill.attention_batch), costs.linear),
        "projections, decode": (work.projections(shape, batch), costs.linear),
        "attention, decode": (
            work.decode_attention(shape, batch * workload.mean_context, batch),
            costs.decode_attention,
        ),
    }
    if shape.experts:
        ranks = configuration.ranks
        points["experts, prefill"] = (work.routed_experts(shape, tokens), costs.experts)
        points["experts, decode"] = (work.routed_experts(shape, batch * ranks, ranks), costs.experts)
    for index, (name, (done, roof)) in enumerate(points.items()):
        if done.bytes and done.flops:
            at = (done.flops / done.bytes, done.flops / roof.seconds(done))
            axes.plot(*at, "os^Dv"[index % 5], markeredgecolor="white", label=name)
    axes.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="operations per second")
    axes.grid(True, which="major", linewidth=0.3)
    axes.legend(fontsize=7, frameon=False, loc="lower right")
    _save(figure, file)


def draw_completion(nodes: Sequence[int], seconds: dict[str, Sequence[float]], file: Path) -> None:
    """Batch completion time against the number of nodes, a line for each of `seconds`."""
    figure, axes = _figure(4.0, 3.0)
    from matplotlib import ticker

    for (name, values), marker in zip(seconds.items(), "os^Dv*", strict=False):
        (line,) = axes.plot(nodes, values, marker=marker, label=name)
        perfect = [values[0] * nodes[0] / count for count in nodes]
        axes.plot(nodes, perfect, ":", linewidth=0.8, color=line.get_color())
    axes.plot([], [], "k:", linewidth=0.8, label="perfect scaling")
    axes.set(xscale="log", yscale="log", xlabel="nodes", ylabel="batch completion time, s", xticks=list(nodes))
    axes.set_xticklabels([str(count) for count in nodes])
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    axes.grid(True, axis="y", linewidth=0.3)
    axes.legend(fontsize=8, frameon=False)
    _save(figure, file)


def draw_layers(costs: Costs, choice: Choice, workload: Workload, file: Path, layers: int = 3) -> None:
    """What each resource does in some layers amid a sweep, in both phases; the critical path is outlined."""
    both = sweeps(costs, choice, workload)
    figure, parts = _figure(7.0, 3.8, rows=2)
    kinds: dict[str, Any] = {}
    for axes, (phase, sweep) in zip(parts, both.items(), strict=True):
        kinds |= _draw_sweep(axes, sweep, costs.shape.layers // 2, layers)
        axes.set_title(phase, loc="left", fontsize=8)
    parts[-1].set_xlabel("time, ms; outlined: the critical path")
    figure.legend(kinds.values(), kinds, loc="outside upper center", ncols=len(kinds), fontsize=7, frameon=False)
    _save(figure, file)


def _draw_sweep(axes: Any, sweep: Sweep, first: int, layers: int) -> dict[str, Any]:
    """Gives a bar of each kind of work, for a legend."""
    resources = [resource for resource in (FETCH, COMPUTE, NETWORK, WRITE) if resource in sweep.busy()]
    critical = set(sweep.schedule.critical)
    chosen = [
        (index, node)
        for index, node in enumerate(sweep.graph.nodes)
        if node.seconds and " of layer " in node.name and first <= int(node.name.rsplit(" ", 1)[1]) < first + layers
    ]
    # Copies of these layers may be made long before: the picture is of the time in which they are computed.
    computed = [index for index, node in chosen if node.resource == COMPUTE]
    origin, end = sweep.schedule.start[computed[0]], max(sweep.schedule.end[index] for index in computed)
    kinds = {}
    for index, node in enumerate(sweep.graph.nodes):
        start, stop = max(sweep.schedule.start[index], origin), min(sweep.schedule.end[index], end)
        kind = node.name.split(" of ")[0]
        if stop <= start or kind not in COLOURS:
            continue
        kinds[kind] = axes.barh(
            resources.index(node.resource),
            (stop - start) * 1e3,
            left=(start - origin) * 1e3,
            color=COLOURS[kind],
            edgecolor="k" if index in critical else "white",
            linewidth=0.8 if index in critical else 0.2,
        )
    axes.set_xlim(0, (end - origin) * 1e3)
    axes.set_yticks(range(len(resources)), resources)
    return kinds


def _figure(width: float, height: float, rows: int = 1) -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise PlanError("pictures need matplotlib: pip install 'hpcgen[plots]'") from None
    figure = Figure(figsize=(width, height), layout="constrained", dpi=200)
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows)


def _save(figure: Any, file: Path) -> None:
    if file.suffix not in (".png", ".svg", ".pdf"):
        raise PlanError(f"{file}: a picture ends with .png, .svg or .pdf")
    try:
        figure.savefig(file)
    except OSError as error:
        raise PlanError(f"{file} cannot be written: {error.strerror}") from None
