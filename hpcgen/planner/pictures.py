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
    COMPUTE: "#4477aa",
    FETCH: "#ccbb44",
    WRITE: "#228833",
    NETWORK: "#aa3377",
}


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
    for (name, roof), style in zip(roofs.items(), ("-", "--", ":"), strict=True):
        axes.plot(
            intensity,
            np.minimum(roof.flops_per_second, intensity * roof.bytes_per_second),
            style,
            color="k",
            label=name,
        )
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
            axes.plot(done.flops / done.bytes, done.flops / roof.seconds(done), "os^Dv"[index % 5], label=name)
    axes.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="operations per second")
    axes.legend(fontsize=6, frameon=False)
    _save(figure, file)


def draw_completion(nodes: Sequence[int], seconds: dict[str, Sequence[float]], file: Path) -> None:
    """Batch completion time against the number of nodes, a line for each of `seconds`."""
    figure, axes = _figure(4.0, 3.0)
    for (name, values), marker in zip(seconds.items(), "os^Dv*", strict=False):
        axes.plot(nodes, values, marker=marker, label=name)
    axes.set(xscale="log", yscale="log", xlabel="nodes", ylabel="batch completion time, s", xticks=list(nodes))
    axes.set_xticklabels([str(count) for count in nodes])
    axes.minorticks_off()
    axes.legend(frameon=False)
    _save(figure, file)


def draw_layers(costs: Costs, choice: Choice, workload: Workload, file: Path, layers: int = 3) -> None:
    """What each resource does in some layers amid a sweep, in both phases; the critical path is outlined."""
    both = sweeps(costs, choice, workload)
    figure, parts = _figure(7.0, 3.6, rows=2)
    for axes, (phase, sweep) in zip(parts, both.items(), strict=True):
        _draw_sweep(axes, sweep, costs.shape.layers // 2, layers)
        axes.set_title(phase, loc="left", fontsize=8)
    parts[-1].set_xlabel("time, ms")
    _save(figure, file)


def _draw_sweep(axes: Any, sweep: Sweep, first: int, layers: int) -> None:
    resources = [resource for resource in (FETCH, COMPUTE, NETWORK, WRITE) if resource in sweep.busy()]
    critical = set(sweep.schedule.critical)
    chosen = [
        (index, node)
        for index, node in enumerate(sweep.graph.nodes)
        if node.seconds and " of layer " in node.name and first <= int(node.name.rsplit(" ", 1)[1]) < first + layers
    ]
    origin = min((sweep.schedule.start[index] for index, _ in chosen), default=0.0)
    for index, node in chosen:
        axes.barh(
            resources.index(node.resource),
            node.seconds * 1e3,
            left=(sweep.schedule.start[index] - origin) * 1e3,
            color=COLOURS[node.resource],
            edgecolor="k" if index in critical else "white",
            linewidth=0.8 if index in critical else 0.2,
        )
    axes.set_yticks(range(len(resources)), resources)


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
