"""Puts an instance together from what the user asked for: model, weight file, and the engine of one or many ranks."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from hpcgen.batch.detokenization import Detokenizer
from hpcgen.cluster.assemble import ClusterAssembly, ClusterOptions, build_cluster_rank
from hpcgen.cluster.coordinator import Coordinator
from hpcgen.cluster.watchdog import Watchdog
from hpcgen.cluster.world import World, device_of_rank, threads_per_rank
from hpcgen.engine.build import EngineOptions, RankAssembly, build_engine
from hpcgen.engine.engine import Engine
from hpcgen.engine.executor import Activity
from hpcgen.engine.stopping import StopMatcher
from hpcgen.errors import HpcgenError
from hpcgen.kernels.native.library import native_library
from hpcgen.model.architecture import context_length, definition_of, read_config
from hpcgen.model.causal import CausalModel
from hpcgen.model.conversion.definition import target_dtype
from hpcgen.model.weight_cache import cached_weight_file, check_checkpoint
from hpcgen.model.weight_file import WeightFile
from hpcgen.planner.machine import machine_of
from hpcgen.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceOptions:
    """Model and machine as the user wants them. Sizes in bytes; None: a default made from the model or the machine."""

    model: Path
    seed: int = 0
    max_model_len: int | None = None
    dtype: torch.dtype | None = None
    device: str = "auto"
    device_memory: int | None = None
    host_memory: int | None = None
    attention_microbatch: int | None = None
    expert_batch: int | None = None
    threads: int | None = None
    stall_timeout: float | None = None
    """Seconds without progress after which a job of many ranks is ended; None: never."""
    migrate: bool = True
    """Whether sequences may move between nodes."""
    partition_below: int | None = None
    """So few sequences left, or fewer, are spread over the ranks (PARTITION); 0: never. None: fewer than ranks."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What every rank makes of the options, before weights are read."""

    model: CausalModel
    detokenizer: Detokenizer
    options: EngineOptions
    ranks: ClusterOptions
    watchdog: Watchdog
    machine: dict[str, Any]
    """What the planner's costs depend on."""

    def stop_matcher(self, sequence: Sequence) -> StopMatcher:
        return self.detokenizer.stop_matcher(sequence.sampling.stop, sequence.sampling.min_tokens)

    def build_rank(self, world: World, weights: WeightFile) -> ClusterAssembly:
        """One of several ranks. Collective."""
        return build_cluster_rank(
            world, self.model, weights, self.options, self.stop_matcher, self.watchdog, self.ranks
        )

    def build_engine(
        self,
        world: World,
        weights: WeightFile,
        on_progress: Callable[[Activity], None] = lambda activity: None,
        on_loss: Callable[[str], None] = lambda line: None,
    ) -> tuple[Engine | Coordinator, RankAssembly]:
        """The engine of the instance, on rank 0, and that rank's assembly. Collective."""
        if world.size > 1:
            rank = self.build_rank(world, weights)
            return Coordinator(world, rank, on_progress, on_loss), rank
        alone = build_engine(self.model, weights, self.options, self.stop_matcher, on_progress=on_progress)
        return alone.engine, alone


def prepare(world: World, options: InstanceOptions) -> Prepared:
    """Raises HpcgenError for what the user can mend. Collective."""
    device = _device(device_of_rank(world, options.device, torch.cuda.device_count()))
    if device.type == "cpu":
        torch.set_num_threads(threads_per_rank(world, options.threads))
    model_type, config = read_config(options.model)
    definition_of(model_type, config)
    dtype = target_dtype(config, options.dtype)
    engine_options = _engine_options(options, device, dtype, _longest(options, config))
    model = CausalModel.build(options.model, dtype, device)
    if world.leads:
        check_checkpoint(options.model, dtype, weight_layout(engine_options))
    detokenizer = Detokenizer.load(options.model)
    watchdog = Watchdog(world, options.stall_timeout if world.size > 1 else None)
    ranks = ClusterOptions(options.migrate, options.partition_below)
    return Prepared(model, detokenizer, engine_options, ranks, watchdog, machine_of(world, device))


def open_weights(world: World, model: Path, options: EngineOptions, say: Callable[[str], None]) -> WeightFile:
    """The weight file, made at first use: by rank 0, and then on each node whose cache is its own. Collective."""
    layout, progress = weight_layout(options), ConversionProgress(say)
    path = None
    for turn in (world.leads, world.is_leader and not world.leads):
        if turn:
            path = cached_weight_file(model, options.dtype, layout, progress=progress, waiting=say)
        world.wait_for_all()
    return WeightFile(world.node_broadcast(path))


def weight_layout(options: EngineOptions) -> str:
    """The layout of the weight file that the kernels of the machine compute fastest with."""
    native = options.device.type == "cpu" and options.dtype is torch.bfloat16 and native_library() is not None
    return "packed" if native else "plain"


class ConversionProgress:
    """Shows the conversion of a checkpoint, at most every few seconds."""

    def __init__(self, say: Callable[[str], None], interval: float = 5.0):
        self._say, self._interval, self._next = say, interval, 0.0

    def __call__(self, written: int, total: int, name: str) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self._interval
            self._say(f"converting the model: {written / max(total, 1):.0%} of {total / 2**30:,.2f} GiB ({name})")


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise HpcgenError(f"There is no device {name!r}; use cpu, cuda, cuda:N or auto.") from None
    if device.type not in ("cpu", "cuda"):
        raise HpcgenError(f"Device {name!r} is not supported; use cpu, cuda, cuda:N or auto.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise HpcgenError("There is no CUDA device, or this torch is built without CUDA; use --device cpu.")
    return device


def _engine_options(options: InstanceOptions, device: torch.device, dtype: torch.dtype, longest: int) -> EngineOptions:
    chosen = {
        name: getattr(options, name)
        for name in ("device_memory", "host_memory", "attention_microbatch", "expert_batch")
        if getattr(options, name) is not None
    }
    return EngineOptions(max_model_len=longest, dtype=dtype, device=device, tokenizer_directory=options.model, **chosen)


def _longest(options: InstanceOptions, config: PreTrainedConfig) -> int:
    """Most tokens of a sequence: what the user wants, or else what the model was made for."""
    if options.max_model_len is None:
        return context_length(config)
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    if isinstance(context, int) and options.max_model_len > context:
        raise HpcgenError(
            f"--max-model-len {options.max_model_len} is more than the model's context, {context} tokens."
        )
    return options.max_model_len
