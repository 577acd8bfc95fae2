"""Puts an engine together for one process: model, weight file, memory, scheduler."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch

from hpcgen.coroutine.call import Stage
from hpcgen.coroutine.lifecycle import Lifecycle
from hpcgen.coroutine.wrapper import Policy
from hpcgen.engine.engine import Engine
from hpcgen.engine.executor import Activity, Executor
from hpcgen.engine.forward import ForwardPass
from hpcgen.engine.stopping import StopMatcherFactory, Stopping
from hpcgen.engine.structured import StructuredOutput
from hpcgen.errors import HpcgenError
from hpcgen.kernels.attention.interface import AttentionBackend
from hpcgen.kernels.select import select_attention, select_experts
from hpcgen.memory.activations import Widths, sweep_bytes
from hpcgen.memory.allocator import keep_freed_memory
from hpcgen.memory.budget import DeviceBudget
from hpcgen.memory.device import BudgetedDevice, Device, InPlaceDevice, PhaseSetup
from hpcgen.memory.device_plan import (
    RING_SLOTS,
    DecodeMemory,
    DeviceNeeds,
    PhaseMemory,
    divide_for_decode,
    divide_for_prefill,
)
from hpcgen.memory.host_capacity import available_bytes
from hpcgen.memory.host_store import HostStore
from hpcgen.memory.parameters import WeightSource
from hpcgen.memory.streams import host_synchronize, open_copy_stream
from hpcgen.model.causal import CausalModel
from hpcgen.model.expert_share import ExpertShare
from hpcgen.model.units import FINAL_NORM
from hpcgen.model.weight_file import WeightFile
from hpcgen.scheduler.plan import Limits, Phase, Topology
from hpcgen.scheduler.scheduler import Scheduler
from hpcgen.sequence import PAGE_TOKENS, pages_for

HOST_SHARE = 0.6
"""Of the available host memory, the share that the host store takes where the user names no size."""
CUDA_SHARE = 0.9
"""Of the free device memory, the share that is used where the user names no size; the rest is for CUDA's own needs."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How a rank runs a model. Sizes in bytes; None: chosen from the machine."""

    max_model_len: int
    dtype: torch.dtype = torch.bfloat16
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    device_memory: int | None = None
    host_memory: int | None = None
    """Host memory for KV."""
    attention_microbatch: int = 1024
    """`B_attn`: tokens of one attention call in prefill, sequences in decode."""
    expert_batch: int = 4096
    """`B_moe`: tokens of a wave, and most sequences that decode at once."""
    decode_microbatch: int | None = None
    """`B_attn` of decode, where it is another one."""
    decode_batch: int | None = None
    """`B_moe` of decode, where it is another one."""
    ring_slots: int = RING_SLOTS
    """Of the ring buffer of parameters in prefill."""
    decode_memory: DecodeMemory = field(default_factory=DecodeMemory)
    watermark: float = 0.9
    """Share of the host store in use at which prefill gives way to decode."""
    refill_below: float = 0.5
    """Share of a full batch below which decode gives way to prefill."""
    decision_steps: int = 16
    attention_backend: str | None = None
    experts_backend: str | None = None
    tokenizer_directory: Path | None = None
    """The model directory; structured output needs the tokenizer in it."""

    @property
    def most_active(self) -> int:
        """Most sequences that decode at once."""
        return self.decode_batch or self.expert_batch

    @property
    def prefill_tokens(self) -> int:
        """Most tokens of an attention call in prefill."""
        return min(self.attention_microbatch, self.expert_batch)

    @property
    def decode_sequences(self) -> int:
        """Most sequences of an attention call in decode."""
        return min(self.decode_microbatch or self.attention_microbatch, self.most_active)


@dataclass(slots=True)
class RankAssembly:
    """What executes plans on one rank, and what it was put together from."""

    executor: Executor
    limits: Limits
    model: CausalModel
    store: HostStore
    device: Device
    budget: DeviceBudget
    phases: dict[Phase, PhaseMemory] | None
    """Division of the device; None where everything is used in place."""
    attention: AttentionBackend
    structured: StructuredOutput


@dataclass(slots=True)
class Assembly(RankAssembly):
    """An engine of one process, and what it was put together from."""

    engine: Engine


def build_engine(
    model: CausalModel,
    weights: WeightFile,
    options: EngineOptions,
    stop_matcher: StopMatcherFactory,
    lifecycle: Lifecycle | None = None,
    policies: dict[Stage, Policy] | None = None,
    on_progress: Callable[[Activity], None] = lambda activity: None,
) -> Assembly:
    """Raises HpcgenError where the memory does not suffice."""
    store = HostStore(model.kv_layout, host_pages(options, model.kv_layout.page_bytes))
    rank = build_rank(model, weights, options, stop_matcher, store, lifecycle, policies, on_progress)
    engine = Engine(Scheduler(Topology(), rank.limits), rank.executor)
    parts = {part.name: getattr(rank, part.name) for part in fields(rank)}
    return Assembly(**parts, engine=engine)


def build_rank(
    model: CausalModel,
    weights: WeightFile,
    options: EngineOptions,
    stop_matcher: StopMatcherFactory,
    store: HostStore,
    lifecycle: Lifecycle | None = None,
    policies: dict[Stage, Policy] | None = None,
    on_progress: Callable[[Activity], None] = lambda activity: None,
    decode_share: ExpertShare | None = None,
) -> RankAssembly:
    """One rank's executor over the host store of its node. `decode_share`: what the rank computes with in decode where
    experts are spread over ranks. Raises HpcgenError where the memory does not suffice."""
    missing = [unit for unit in model.units if unit not in weights.units]
    if missing:
        raise HpcgenError(
            f"The weight file {weights.path} has no {missing[0]}: it belongs to another model. Remove it and run again."
        )
    layout = model.kv_layout
    keep_freed_memory()
    if options.device.type == "cuda":
        store.pin()
    limit = device_limit(options)
    budget = DeviceBudget(limit, options.device)
    units = list(model.units)
    phases = None
    device: Device
    if limit is None:
        device = InPlaceDevice(weights, model, units, store)
    else:
        decode_needs = device_needs(model, decode_share or weights, options)
        phases = {
            Phase.PREFILL: divide_for_prefill(limit, device_needs(model, weights, options), options.ring_slots),
            Phase.DECODE: divide_for_decode(limit, decode_needs, options.decode_memory),
        }
        setups = {
            Phase.PREFILL: PhaseSetup(phases[Phase.PREFILL], weights, model),
            Phase.DECODE: PhaseSetup(phases[Phase.DECODE], decode_share or weights, decode_share or model),
        }
        stream = open_copy_stream(options.device)
        synchronize = host_synchronize(options.device)
        device = BudgetedDevice(units, store, budget, setups, stream, synchronize)
    in_pages = phases is not None and phases[Phase.DECODE].kv == "pages"
    limits = Limits(
        host_pages=store.count,
        device_pages=phases[Phase.DECODE].kv_bytes // layout.page_bytes if phases and in_pages else None,
        wave_tokens=options.expert_batch,
        max_active=options.most_active,
        decision_steps=min(options.decision_steps, PAGE_TOKENS),
        watermark=options.watermark,
        refill_below=options.refill_below,
    )
    model.experts_backend = select_experts(options.device, options.dtype, options.experts_backend)
    attention = select_attention(options.device, options.dtype, options.attention_backend)
    lifecycle = lifecycle or Lifecycle()
    structured = StructuredOutput(options.tokenizer_directory, model.vocabulary)
    structured.follow(lifecycle)
    at_once = max(options.expert_batch, options.most_active)
    forward = ForwardPass(model, device, attention, at_once, policies, structured)
    microbatches = {Phase.PREFILL: options.prefill_tokens, Phase.DECODE: options.decode_sequences}
    executor = Executor(device, forward, Stopping(stop_matcher), microbatches, lifecycle, on_progress)
    return RankAssembly(executor, limits, model, store, device, budget, phases, attention, structured)


def device_limit(options: EngineOptions) -> int | None:
    """Bytes that a rank may use of its device; None: the host store is used in place."""
    if options.device_memory is None and options.device.type == "cuda":
        return int(torch.cuda.mem_get_info(options.device)[0] * CUDA_SHARE)
    return options.device_memory


def host_pages(options: EngineOptions, page_bytes: int) -> int:
    """Pages of the host store of a node."""
    memory = options.host_memory if options.host_memory is not None else int(available_bytes() * HOST_SHARE)
    return memory // page_bytes


def device_needs(model: CausalModel, weights: WeightSource, options: EngineOptions) -> DeviceNeeds:
    """What `options` ask of a device that computes with `weights` of this model."""
    sequence_pages = pages_for(options.max_model_len)
    unit_bytes = {unit: weights.unit_bytes(unit) for unit in model.units}
    return DeviceNeeds(
        unit_bytes=unit_bytes,
        always_resident=(FINAL_NORM,),
        layout=model.kv_layout,
        sequence_pages=sequence_pages,
        microbatch_pages=2 * pages_for(options.prefill_tokens),
        active_pages=options.most_active * sequence_pages,
        prefill_activations=activation_bytes(model, options.prefill_tokens, options.expert_batch),
        decode_activations=activation_bytes(model, options.decode_sequences, options.most_active),
    )


def activation_bytes(model: CausalModel, microbatch: int, tokens: int) -> int:
    """Bytes that one sweep over `tokens` tokens works in, besides parameters and KV."""
    config = model.config.get_text_config()
    hidden, heads = config.hidden_size, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    widths = Widths(
        hidden=hidden,
        vocabulary=config.vocab_size,
        queries=heads * head_dim,
        dense=config.intermediate_size,
        expert=getattr(config, "moe_intermediate_size", None) or config.intermediate_size,
        experts_per_token=getattr(config, "num_experts_per_tok", None) or 0,
    )
    return sweep_bytes(widths, microbatch, tokens, model.dtype.itemsize)
