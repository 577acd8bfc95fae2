"""`hpcgen profile`: measures the kernels of one layer and what the engine adds to them, and fits the costs."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch

from hpcgen.cluster.world import World, device_of_rank, threads_per_rank
from hpcgen.engine.build import Assembly, EngineOptions, build_engine
from hpcgen.kernels.attention.kv_layout import KVLayout
from hpcgen.memory.host_capacity import available_bytes
from hpcgen.model.architecture import read_config
from hpcgen.model.causal import CausalModel
from hpcgen.model.conversion.definition import target_dtype
from hpcgen.model.weight_cache import cached_weight_file
from hpcgen.model.weight_file import WeightFile
from hpcgen.planner import work
from hpcgen.planner.configuration import PhaseConfiguration
from hpcgen.planner.costs import Costs
from hpcgen.planner.defaults import shape_of_run
from hpcgen.planner.kernel_timing import KernelTiming, Stopwatch, Timing, disk_reads
from hpcgen.planner.machine import machine_of
from hpcgen.planner.model_shape import ModelShape
from hpcgen.planner.profile_file import KernelFit, LinkFit, Profile
from hpcgen.planner.rank_timing import RankTiming
from hpcgen.planner.roofline import Fit, fit
from hpcgen.planner.sweep import decode_sweep, prefill_sweep
from hpcgen.sequence import SamplingParams, Sequence

LOADS = ((1, 16), (4, 64), (8, 32), (16, 64), (32, 16), (64, 32), (64, 128), (192, 64))
"""(sequences, prompt tokens) of the engine's runs."""
DECODE_STEPS = 12


def measure(
    directory: Path,
    dtype: str | None = None,
    threads: int | None = None,
    device: str = "auto",
    say: Callable[[str], None] = lambda line: None,
    world: World | None = None,
) -> Profile:
    """The costs of the model in `directory` on this machine. Collective: several ranks measure at the same time.

    Raises HpcgenError for a model that cannot be run.
    """
    world = world or World()
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    target = torch.device(device_of_rank(world, device, torch.cuda.device_count()))
    if target.type == "cpu":
        torch.set_num_threads(threads_per_rank(world, threads))
    config = read_config(directory)[1]
    wanted = target_dtype(config, getattr(torch, dtype) if dtype is not None else None)
    shape = sized_as(ModelShape.read(directory), wanted)
    model = CausalModel.build(directory, wanted, target)
    weights = _weights(world, directory, wanted, "packed" if target.type == "cpu" else "plain")
    watch = Stopwatch(target, world)
    kernels = KernelTiming(shape, model.kv_layout, wanted, watch)
    points: dict[str, list[Timing]] = {}
    for name in ("linear", "decode_attention", "prefill_attention", "experts"):
        say(f"measuring {name.replace('_', ' ')}")
        timings = getattr(kernels, name)()
        if timings:
            points[name] = timings
    say("measuring copies and reads")
    links = {"host": kernels.copy(True), "back": kernels.copy(False), "disk": disk_reads(weights.path)}
    page_fixed = max(
        kernels.page_copy() - model.kv_layout.layer_bytes / _fit(links["host"]).roofline.bytes_per_second, 0
    )
    step_fixed = 0.0
    if world.size > 1:
        say("measuring what ranks send each other")
        between = RankTiming(world, shape, wanted, target)
        links |= {"local": between.exchange(False), "remote": between.exchange(True), "window": between.window()}
        step_fixed = between.reduction() if shape.experts else 0.0
    profile = Profile(
        machine=machine_of(world, target),
        model=str(directory.resolve()),
        shape=asdict(shape),
        host_memory=float(available_bytes()),
        device_memory=None if target.type == "cpu" else float(torch.cuda.mem_get_info(target)[1]),
        fits={name: KernelFit.of(_fit(timings), len(timings)) for name, timings in points.items()},
        links=_link_fits(links),
        points={
            name: [{"flops": t.work.flops, "bytes": t.work.bytes, "seconds": t.seconds} for t in timings]
            for name, timings in (points | links).items()
        },
    )
    say("measuring the engine around them")
    whole = _with_engine(profile, shape, model, weights, wanted, watch)
    return replace(whole, step_fixed=whole.step_fixed + step_fixed, page_fixed=page_fixed)


def _weights(world: World, directory: Path, dtype: torch.dtype, layout: str) -> WeightFile:
    """Converted by rank 0 first, and then on each node whose cache is its own."""
    for turn in (world.leads, not world.leads):
        if turn:
            path = cached_weight_file(directory, dtype, layout)
        world.wait_for_all()
    return WeightFile(path)


def _link_fits(links: dict[str, list[Timing]]) -> dict[str, LinkFit]:
    """Those without measurements are taken from the next best."""
    fits = {name: LinkFit.of(_fit(timings), len(timings)) for name, timings in links.items() if timings}
    copy = replace(fits["back"], points=0)
    local = fits.setdefault("local", copy)
    fits.setdefault("remote", replace(local, points=0))
    fits.setdefault("window", copy)
    return fits


def sized_as(shape: ModelShape, dtype: torch.dtype) -> ModelShape:
    """The shape with parameters and KV in `dtype`, where they are not quantised."""
    return shape_of_run(shape, float(dtype.itemsize), str(dtype).removeprefix("torch."))


def _fit(timings: list[Timing]) -> Fit:
    return fit([t.work for t in timings], [t.seconds for t in timings])


def _with_engine(
    profile: Profile,
    shape: ModelShape,
    model: CausalModel,
    weights: WeightFile,
    dtype: torch.dtype,
    watch: Stopwatch,
) -> Profile:
    """Adds what waves and steps take beyond their kernels: by layer, by token, by sampled token, by step.

    Least squares of the relative error, each at least 0.
    """
    longest = max(length for _, length in LOADS) + 2 * DECODE_STEPS + 1
    options = EngineOptions(
        longest, dtype, watch.device, host_memory=_pages_bytes(model.kv_layout, longest), attention_microbatch=1 << 20,
        expert_batch=1 << 14, decision_steps=DECODE_STEPS,
    )  # fmt: skip
    assembly = build_engine(model, weights, options, lambda sequence: None)  # type: ignore[arg-type,return-value]
    costs = profile.costs(shape)
    ids = itertools.count()
    rows: list[list[float]] = []
    residuals: list[float] = []
    measured: list[float] = []
    _run(assembly, watch, shape, ids, 2, 16)  # the first run finds cold caches
    for sequences, length in LOADS:
        tokens = sequences * length
        prefill, step = _run(assembly, watch, shape, ids, sequences, length)
        predicted = _wave_seconds(costs, tokens, length, sequences)
        rows.append([shape.layers, shape.layers * tokens, sequences, 1.0, _weight_bytes(shape, tokens)])
        residuals.append(prefill - predicted)
        measured.append(prefill)
        predicted = _step_seconds(costs, sequences, sequences * (length + DECODE_STEPS))
        rows.append([shape.layers, shape.layers * sequences, sequences, 1.0, _weight_bytes(shape, sequences)])
        residuals.append(step - predicted)
        measured.append(step)
    assembly.device.close()
    table, left, taken = np.array(rows), np.array(residuals), np.array(measured)
    constants = _non_negative(table, left, taken)
    layer, token, row, each, weight = constants
    errors = np.abs(table @ constants - left) / taken
    return replace(
        profile,
        layer_fixed=layer,
        token_fixed=token,
        weight_fixed=weight,
        row_fixed=row,
        step_fixed=each,
        engine_median_error=float(np.median(errors)),
        engine_worst_error=float(errors.max()),
    )


def _run(
    assembly: Assembly, watch: Stopwatch, shape: ModelShape, ids: Iterator[int], count: int, length: int
) -> tuple[float, float]:
    """Seconds of the prefill of `count` prompts of `length` tokens in one wave, and of a decode step after it."""
    engine = assembly.engine
    generator = np.random.default_rng(count * 1000 + length)
    sampling = SamplingParams(max_tokens=2 * DECODE_STEPS + 1, temperature=0.0)
    for _ in range(count):
        index = next(ids)
        prompt = array("I", generator.integers(0, shape.vocabulary, length).tolist())
        engine.add(Sequence(index, index, 0, prompt, sampling))
    watch.wait_for_all()
    begin = watch.now()
    engine.step()
    prefill = watch.now() - begin
    watch.wait_for_all()
    before = engine.activity.steps
    begin = watch.now()
    while engine.pending:
        engine.step()
    return watch.mean(prefill), watch.mean((watch.now() - begin) / (engine.activity.steps - before))


def _weight_bytes(shape: ModelShape, tokens: float) -> float:
    """Of the weights that a sweep over so many tokens reads."""
    experts = work.chosen_experts(shape, tokens) * shape.expert_parameters * shape.expert_bytes
    dense = shape.dense_layers * shape.dense_parameters * shape.weight_bytes
    return shape.layers * shape.attention_bytes + shape.moe_layers * experts + dense + shape.head_bytes


def _wave_seconds(costs: Costs, tokens: int, length: float, rows: int) -> float:
    phase = PhaseConfiguration(1 << 20, tokens, costs.shape.layers, 0)
    return prefill_sweep(costs, phase, tokens, length, rows).seconds


def _step_seconds(costs: Costs, sequences: int, context: float) -> float:
    phase = PhaseConfiguration(1 << 20, sequences, costs.shape.layers, 0)
    return decode_sweep(costs, phase, 1, sequences, context, sequences).seconds


def _non_negative(rows: np.ndarray, residuals: np.ndarray, measured: np.ndarray) -> list[float]:
    """Least squares of (rows @ x - residuals) / measured with x at least 0, by dropping what comes out below."""
    kept = list(range(rows.shape[1]))
    while kept:
        scaled = rows[:, kept] / measured[:, None]
        scale = np.abs(scaled).max(axis=0)
        solution = np.linalg.lstsq(scaled / scale, residuals / measured, rcond=None)[0] / scale
        if (solution >= 0).all():
            result = np.zeros(rows.shape[1])
            result[kept] = solution
            return [float(value) for value in result]
        kept.remove(kept[int(np.argmin(solution * scale))])
    return [0.0] * rows.shape[1]


def _pages_bytes(layout: KVLayout, longest: int) -> int:
    most = max(sequences for sequences, _ in LOADS)
    return int(layout.page_bytes * (most * (longest // 64 + 2)) / 0.8)
