"""The table and the picture of a comparison."""

import platform
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from hpcgen.kernels.native.isa import cpu_flags, usable_isas

Results = list[dict[str, Any]]
COLOURS = {"hpcgen": "#ee6677", "vllm": "#4477aa", "openvino": "#228833", "transformers": "#ccbb44"}


def write_report(results: Results, command: str, output: Path) -> None:
    """OUTPUT.md and OUTPUT.svg."""
    grouped = _grouped(results)
    sections = [_heading(command), _batches(grouped), _starts(results), _growth(grouped)]
    output.with_suffix(".md").write_text("\n\n".join(section for section in sections if section) + "\n")
    _draw(grouped, output.with_suffix(".svg"))


def _grouped(results: Results) -> dict[tuple[str, str, int], dict[str, Results]]:
    """By (model, work, requests), then by engine."""
    grouped: dict[tuple[str, str, int], dict[str, Results]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        grouped[result["model"], result["work"], result["requests"]][result["engine"]].append(result)
    return grouped


def _heading(command: str) -> str:
    return (
        f"# hpcgen beside other engines\n\n`{command}`\n\n"
        f"On {_processor()}, {usable_isas(cpu_flags())[0].name}. Greedy, bf16, the same token counts for all; seconds "
        "are those of the batch after loading, the median where it was repeated. W1: 128 tokens in and 128 out. W2: 32 "
        "to 512 in, long-tailed outputs up to 1,024. W3: 1,024 in, 16 out. OpenVINO reads an fp16 file."
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _batches(grouped: dict) -> str:
    engines = sorted({engine for by_engine in grouped.values() for engine in by_engine} - {"hpcgen"})
    lines = [
        "| model | work | requests | hpcgen, s | " + "".join(f"{engine}, s | " for engine in engines)
        + "times faster than the fastest | output tokens/s | runs |",
        "|---" * (6 + len(engines) + 1) + "|",
    ]  # fmt: skip
    for (model, work, count), by_engine in sorted(grouped.items()):
        if work in ("first", "short") or "hpcgen" not in by_engine:
            continue
        _check_tokens(by_engine)
        seconds = {engine: median(run["seconds"] for run in runs) for engine, runs in by_engine.items()}
        own = seconds["hpcgen"]
        others = [seconds[engine] for engine in engines if engine in seconds]
        cells = [f"{seconds[engine]:.1f}" if engine in seconds else "" for engine in engines]
        ratio = f"{min(others) / own:.2f}" if others else ""
        tokens = by_engine["hpcgen"][0]["output_tokens"] / own
        runs = ", ".join(str(len(by_engine[engine])) for engine in ("hpcgen", *engines) if engine in by_engine)
        row = [model, work, f"{count:,}", f"{own:.1f}", *cells, ratio, f"{tokens:,.0f}", runs]
        lines.append("| " + " | ".join(row) + " |")
    disturbed = [run["others"] for by in grouped.values() for runs in by.values() for run in runs]
    if disturbed:
        lines.append(f"\nOther processes had at most {max(disturbed):.0%} of the machine during a run.")
    return "\n".join(lines)


def _check_tokens(by_engine: dict[str, Results]) -> None:
    counts = {(run["prompt_tokens"], run["output_tokens"]) for runs in by_engine.values() for run in runs}
    if len(counts) > 1:
        raise SystemExit(f"the engines did not do the same work: {counts}")


def _starts(results: Results) -> str:
    lines = ["| model | engine | start to first token, s | peak memory, GB |", "|---|---|---|---|"]
    for model, engine in sorted({(result["model"], result["engine"]) for result in results}):
        own = [result for result in results if (result["model"], result["engine"]) == (model, engine)]
        starts = [r for r in own if r["work"] == "first"] or own
        first = median(result["first_token"] for result in starts)
        lines.append(f"| {model} | {engine} | {first:.1f} | {max(r['peak_bytes'] for r in own) / 1e9:.1f} |")
    return "\n".join(lines)


def _growth(grouped: dict) -> str:
    rows = sorted((count, model, by) for (model, work, count), by in grouped.items() if work == "short")
    if not rows:
        return ""
    lines = [
        "Growth with the input: requests of 32 tokens in and 16 out.\n",
        "| model | requests | seconds after loading | ms a request | peak memory, GB |",
        "|---|---|---|---|---|",
    ]
    for count, model, by_engine in rows:
        run = by_engine["hpcgen"][0]
        lines.append(
            f"| {model} | {count:,} | {run['seconds']:.2f} | {run['seconds'] / count * 1e3:.2f} "
            f"| {run['peak_bytes'] / 1e9:.1f} |"
        )
    return "\n".join(lines)


def _draw(grouped: dict, file: Path) -> None:
    """Output tokens a second against the requests of W1, a panel for each model; and growth with the input."""
    models = sorted({model for model, work, _ in grouped if work == "W1"})
    growth = sorted((count, by["hpcgen"][0]["seconds"]) for (_, work, count), by in grouped.items() if work == "short")
    panels = len(models) + bool(growth)
    if not panels:
        return
    figure = Figure(figsize=(3.6 * panels, 3.0), layout="constrained")
    all_axes = figure.subplots(1, panels, squeeze=False)[0]
    for axes, model in zip(all_axes, models, strict=False):
        _draw_throughput(axes, model, grouped)
    if growth:
        axes = all_axes[-1]
        axes.plot(*zip(*growth, strict=True), marker="o", markersize=4, color=COLOURS["hpcgen"])
        axes.set(title="growth", xlabel="short requests", ylabel="seconds", xscale="log", yscale="log")
    figure.savefig(file, metadata={"Date": None})


def _draw_throughput(axes: Any, model: str, grouped: dict) -> None:
    curves: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for (name, work, count), by_engine in sorted(grouped.items()):
        if name == model and work == "W1":
            for engine, runs in by_engine.items():
                seconds = median(run["seconds"] for run in runs)
                curves[engine].append((count, runs[0]["output_tokens"] / seconds))
    for engine, points in sorted(curves.items()):
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, color=COLOURS.get(engine), label=engine)
    axes.set(title=model, xlabel="requests of W1", ylabel="output tokens/s", xscale="log", ylim=(0, None))
    counts = sorted({count for points in curves.values() for count, _ in points})
    axes.set_xticks(counts, list(map(str, counts)))
    axes.minorticks_off()
    axes.legend(frameon=False)
