"""`hpcgen plan`, `simulate` and `profile`: arguments in, text and files out."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path

import numpy as np

from hpcgen.planner.baselines import layerwise_offload, on_demand, tuned_continuous
from hpcgen.planner.costs import Costs
from hpcgen.planner.deadline import most_within
from hpcgen.planner.errors import PlanError
from hpcgen.planner.explain import clock, report
from hpcgen.planner.hardware import load_cluster
from hpcgen.planner.model_shape import ModelShape
from hpcgen.planner.outcome import Failure, Outcome, Preemption
from hpcgen.planner.profile_file import Profile
from hpcgen.planner.saturation import completion_by_nodes, instance_sizes, least_ranks, saturated
from hpcgen.planner.search import HOST_SHARE, Choice, Memory, choose
from hpcgen.planner.simulator import Simulation
from hpcgen.planner.timeline import write_timeline
from hpcgen.planner.workload import Workload, draw, read_output_lengths, read_requests


def add_plan_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="batch sizes, memory and predicted completion time",
        description="Choose batch sizes and memory for a batch, predict when it is done, and say what limits it.",
    )
    _add_common(parser)
    parser.add_argument("--slo", type=duration, metavar="TIME", help="the most sequences that finish in 30m, 1h, 90s")
    parser.add_argument("--saturation", action="store_true", help="the best size of an instance, and how many")
    pictures = parser.add_argument_group("pictures", "PNG, SVG or PDF, by the suffix of FILE.")
    pictures.add_argument("--roofline", type=Path, metavar="FILE", help="the roofs, and the chosen batches on them")
    pictures.add_argument("--layers", type=Path, metavar="FILE", help="critical path of some layers in both phases")
    pictures.add_argument("--scaling", type=Path, metavar="FILE", help="completion time against nodes")
    parser.set_defaults(call=plan)


def add_simulate_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "simulate",
        help="rehearse a batch: the real scheduler on a virtual clock",
        description="Rehearse a batch on any number of ranks: the real scheduler on a virtual clock.",
    )
    _add_common(parser)
    parser.add_argument("--baselines", action="store_true", help="what other systems would take on the same costs")
    parser.add_argument("--instances", type=_positive, default=1, help="instances of this size that share the batch")
    parser.add_argument(
        "--failure", action="append", default=[], metavar="TIME:RANK[:node]", help="a rank, or its node, that dies"
    )
    parser.add_argument(
        "--preemption", action="append", default=[], metavar="TIME:AWAY", help="the instance stops, and goes on later"
    )
    parser.add_argument(
        "--timeline", type=Path, metavar="FILE", help="trace for Perfetto (.json) or picture (.png, .svg)"
    )
    parser.set_defaults(call=simulate)


def add_profile_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "profile",
        help="measure a layer of a model on this machine and fit the costs",
        description="Measure one layer of a model on this machine, and fit the costs that `plan`, `simulate` and `run` "
        "use. Under mpirun or srun, all ranks measure at the same time, and what they send each other too.",
    )
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="Hugging Face model directory")
    parser.add_argument(
        "--output", type=Path, metavar="FILE",
        help="profile, a JSON file (default: in the cache, where `run` and `submit` look for it)",
    )  # fmt: skip
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:N or auto (default)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="default: the checkpoint's")
    parser.add_argument("--threads", type=_positive, help="of a rank (default: torch's)")
    parser.set_defaults(call=profile)


def plan(arguments: argparse.Namespace) -> int:
    costs, ranks, per_node, memory = _machine(arguments)
    workload = _workload(arguments)
    if arguments.slo is not None:
        found = most_within(
            arguments.slo, workload, lambda load: choose(costs, ranks, per_node, memory, load).estimate.seconds, 2**22
        )
        if not found.sequences:
            raise PlanError(f"not one sequence of this workload finishes within {clock(arguments.slo)}")
        print(f"{found.sequences:,} sequences finish within {clock(arguments.slo)} (in {clock(found.seconds)}):\n")
        workload = workload.sized(found.sequences)
    try:
        choice = choose(costs, ranks, per_node, memory, workload)
    except PlanError as error:
        enough = least_ranks(costs, per_node, memory, workload)
        raise PlanError(f"{error}. " + (f"{enough} ranks are enough." if enough else "More do not help.")) from None
    print(report(costs, choice, memory, workload))
    enough = least_ranks(costs, per_node, memory, workload, ranks)
    nodes = -(-(enough or ranks) // per_node)
    print(f"\nnodes needed   {nodes}: the model and its longest sequence fit {enough or ranks} ranks")
    if arguments.saturation:
        sizes = instance_sizes(costs, per_node, memory, workload, ranks)
        best = saturated(sizes)
        print("\nranks of an instance, tokens/s a rank:")
        for size in sizes:
            print(f"  {size.ranks:5d} {size.tokens_per_rank:12,.1f}" + ("  <- enough" if size is best else ""))
        print(f"run {max(ranks // best.ranks, 1)} instances of {best.ranks} ranks")
    _draw(arguments, costs, choice, memory, workload)
    return 0


def _draw(arguments: argparse.Namespace, costs: Costs, choice: Choice, memory: Memory, workload: Workload) -> None:
    if arguments.roofline or arguments.layers or arguments.scaling:
        from hpcgen.planner import pictures
    if arguments.roofline is not None:
        pictures.draw_roofline(costs, choice, workload, arguments.roofline)
        print(arguments.roofline)
    if arguments.layers is not None:
        pictures.draw_layers(costs, choice, workload, arguments.layers)
        print(arguments.layers)
    if arguments.scaling is not None:
        found = completion_by_nodes(costs, choice.configuration.ranks_per_node, memory, workload)
        pictures.draw_completion(list(found), {costs.shape.name: list(found.values())}, arguments.scaling)
        print(arguments.scaling)


def simulate(arguments: argparse.Namespace) -> int:
    costs, ranks, per_node, memory = _machine(arguments)
    workload = _workload(arguments)
    choice = choose(costs, ranks, per_node, memory, workload)
    outcomes = []
    for instance in range(arguments.instances):
        part = Workload(*(lengths[instance :: arguments.instances] for lengths in _columns(workload)))
        failures = [_failure(text, ranks) for text in arguments.failure] if instance == 0 else []
        stops = [_preemption(text) for text in arguments.preemption] if instance == 0 else []
        simulation = Simulation(costs, choice.configuration, part, failures=failures, preemptions=stops)
        outcomes.append(simulation.run())
    slowest = max(outcomes, key=lambda outcome: outcome.seconds)
    print(_describe(outcomes, slowest))
    if arguments.baselines:
        print("\nother systems on the same costs:")
        share = workload.first(-(-len(workload) // arguments.instances))
        for baseline in (tuned_continuous, layerwise_offload, on_demand):
            try:
                other = baseline(costs, memory, ranks, share)
            except PlanError as error:
                print(f"  {baseline.__name__.replace('_', ' ')}: {error}")
                continue
            times = other.seconds / slowest.seconds
            print(f"  {other.name:<22} {clock(other.seconds):>12}  {times:.2f} times as long  ({other.setting})")
    if arguments.timeline is not None:
        write_timeline(slowest.spans, arguments.timeline)
        print(f"\n{arguments.timeline}")
    return 0


def profile(arguments: argparse.Namespace) -> int:
    from hpcgen.cluster.world import open_world
    from hpcgen.model.weight_cache import cache_directory
    from hpcgen.planner.profile import measure
    from hpcgen.planner.profile_store import default_file

    with open_world() as world:
        say = (lambda line: print(line, flush=True)) if world.leads else (lambda line: None)
        measured = measure(
            arguments.model,
            dtype=arguments.dtype,
            threads=arguments.threads,
            device=arguments.device,
            say=say,
            world=world,
        )
        if not world.leads:
            return 0
        file = arguments.output or default_file(cache_directory(), measured)
        measured.write(file)
        say(measured.describe())
        say(f"\n{file}: `run` and `submit` find it here" if arguments.output is None
            else f"\n{file}: use it as --cluster {file}")  # fmt: skip
    return 0


def duration(text: str) -> float:
    """Seconds of '30m', '1h', '1.5h', '90s' or '90'."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d)?", text.strip())
    if match is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time: write 30m, 1h or 90s")
    return float(match[1]) * {None: 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}[match[2]]


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", type=Path, required=True, metavar="DIR", help="model directory, or a config.json; no weights needed"
    )
    parser.add_argument(
        "--cluster", metavar="NAME",
        help="h20x16 (devices of configs/clusters), FILE.yaml:DEVICES, or a profile, FILE.json:RANKS (default: one "
        "rank on this machine, by its profile or a quick measurement)",
    )  # fmt: skip
    parser.add_argument("--workload", type=Path, metavar="JSONL", help="requests: their lengths are planned for")
    parser.add_argument("--sequences", type=_positive, default=10_000, help="of a synthetic workload (default: 10000)")
    parser.add_argument("--prompt-tokens", default="lognormal:500:0.5", metavar="DISTRIBUTION",
                        help="fixed:N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA[:LONGEST]")  # fmt: skip
    parser.add_argument("--output-tokens", metavar="DISTRIBUTION|RESULTS",
                        help="as --prompt-tokens, or the results of an earlier run (default: lognormal:1000:0.7:16384; "
                        "of a file of requests, all that they may have)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of drawn lengths (default: 0)")


def _machine(arguments: argparse.Namespace) -> tuple[Costs, int, int, Memory]:
    shape = ModelShape.read(arguments.model)
    if arguments.cluster is None:
        return _this_machine(shape)
    file, _, ranks = arguments.cluster.partition(":")
    if file.endswith(".json"):
        measured = Profile.read(Path(file))
        count = int(ranks) if ranks.isdigit() and ranks != "0" else measured.ranks
        per_node = -(-count // int(measured.machine["nodes"]))
        return measured.costs(shape, per_node), count, per_node, measured.memory()
    hardware = load_cluster(arguments.cluster)
    return Costs.from_hardware(shape, hardware), hardware.devices, hardware.devices_per_node, Memory.of(hardware)


def _this_machine(shape: ModelShape) -> tuple[Costs, int, int, Memory]:
    import torch

    from hpcgen.cluster.world import World
    from hpcgen.engine.build import CUDA_SHARE
    from hpcgen.memory.host_capacity import available_bytes
    from hpcgen.model.weight_cache import cache_directory
    from hpcgen.planner.machine import costs_here, machine_of

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, shape.compute_dtype if shape.compute_dtype in ("float16", "float32") else "bfloat16")
    costs, source = costs_here(cache_directory(), machine_of(World(), device), shape, device, dtype)
    print(f"this machine: {source}")
    on_device = torch.cuda.mem_get_info(device)[0] * CUDA_SHARE if device.type == "cuda" else None
    costs = replace(costs, streamed=on_device is not None)
    return costs, 1, 1, Memory(on_device, available_bytes() * HOST_SHARE)


def _workload(arguments: argparse.Namespace) -> Workload:
    given = arguments.output_tokens
    if arguments.workload is not None:
        workload = read_requests(arguments.workload)
        if given is None:
            return workload
        outputs = _outputs(given, len(workload), arguments.seed)
        return Workload.of(workload.prompts, np.minimum(outputs, workload.most), workload.most)
    prompts = draw(arguments.prompt_tokens, arguments.sequences, arguments.seed)
    return Workload.of(prompts, _outputs(given or "lognormal:1000:0.7:16384", arguments.sequences, arguments.seed + 1))


def _outputs(given: str, count: int, seed: int) -> np.ndarray:
    if Path(given).is_file():
        known = read_output_lengths(Path(given))
        return known if len(known) == count else np.random.default_rng(seed).choice(known, count)
    return draw(given, count, seed)


def _columns(workload: Workload) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return workload.prompts, workload.outputs, workload.most


def _failure(text: str, ranks: int) -> Failure:
    time, _, rest = text.partition(":")
    rank, _, node = rest.partition(":")
    if not rank.isdigit() or int(rank) >= ranks or node not in ("", "node"):
        raise PlanError(f"{text!r} is not a failure: write 10m:3 for rank 3 after ten minutes, 10m:3:node for its node")
    try:
        return Failure(duration(time), int(rank), bool(node))
    except argparse.ArgumentTypeError as error:
        raise PlanError(str(error)) from None


def _preemption(text: str) -> Preemption:
    time, _, away = text.partition(":")
    try:
        return Preemption(duration(time), duration(away))
    except argparse.ArgumentTypeError as error:
        raise PlanError(f"{text!r} is not a preemption: write 10m:5m for five minutes away ({error})") from None


def _describe(outcomes: list[Outcome], slowest: Outcome) -> str:
    finish = np.concatenate([outcome.finish for outcome in outcomes])
    done = finish[~np.isnan(finish)]
    phases = ", ".join(f"{phase} {clock(seconds)}" for phase, seconds in slowest.phase_seconds.items())
    percentiles = (
        ", ".join(f"{p}%: {clock(float(np.percentile(done, p)))}" for p in (50, 90, 99)) if len(done) else "none"
    )
    busy = slowest.busy / max(slowest.seconds, 1e-12)
    by_phase = ", ".join(
        f"{phase} {slowest.busy_in_phase.get(phase, 0.0) / max(seconds * len(busy), 1e-12):.1%}"
        for phase, seconds in slowest.phase_seconds.items()
    )
    return "\n".join(
        [
            f"completion     {clock(slowest.seconds)} ({phases})",
            f"sequences      {len(done):,} finished, {len(finish) - len(done):,} can never fit",
            f"completed      {percentiles}",
            f"tokens         {sum(o.prefilled_tokens for o in outcomes):,} prefilled, "
            f"{sum(o.decoded_tokens for o in outcomes):,} decoded",
            f"utilisation    mean {busy.mean():.1%} ({by_phase}), least used rank {busy.min():.1%}, "
            f"most used {busy.max():.1%}",
            f"scheduling     {slowest.decisions:,} decisions, {slowest.migrations:,} migrations, "
            f"{slowest.discards:,} discards",
        ]
    )
