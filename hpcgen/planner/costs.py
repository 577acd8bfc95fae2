"""Seconds of every part of a forward pass on one rank: from a data sheet, or from a profile of the machine."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hpcgen.planner import work
from hpcgen.planner.hardware import Hardware, Link
from hpcgen.planner.model_shape import ModelShape
from hpcgen.planner.roofline import Roofline
from hpcgen.sequence import PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class Costs:
    """Rooflines of the kernels and links of one rank, for one model."""

    shape: ModelShape
    linear: Roofline
    """Projections, dense MLPs, shared experts and the head."""
    prefill_attention: Roofline
    decode_attention: Roofline
    experts: Roofline
    host: Link
    """Host memory to device."""
    back: Link
    """Device to host memory."""
    local: Link
    """To other ranks of the node."""
    remote: Link
    """To other nodes."""
    disk: Link
    window: Link | None = None
    """Pages out of another node's host store; None: as `remote`."""
    layer_fixed: float = 0.0
    """Seconds of a microbatch in a layer that no kernel accounts for: launches, and the Python of a definition."""
    token_fixed: float = 0.0
    """Seconds of a token in a layer beside the kernels: norms, rotary embedding, residuals, writing its KV."""
    weight_fixed: float = 0.0
    """Seconds of a byte of weights beside the kernels, which were timed on memory that is not a mapped file."""
    page_fixed: float = 0.0
    """Seconds of a page's KV of one layer that is copied by itself, beside its bytes."""
    row_fixed: float = 0.0
    """Seconds of a sampled token beside the head: sampling, and the work on its sequence."""
    step_fixed: float = 0.0
    """Seconds of a step that no layer accounts for: sampling, finishing, the exchange with the scheduler."""
    ranks_per_node: int = 8
    streamed: bool = True
    """Whether parameters and KV must be copied to a device at all; on a CPU they are used in place."""
    copies_compute: bool = False
    """Whether the processor that computes does the copies too, so that none hides the other: a CPU with one core."""
    overlaps_exchange: bool = False
    """Whether a microbatch's tokens are dispatched while the next is computed. Our engine dispatches all at once."""
    ranks_a_core: float = 1.0
    """Ranks that share the cores of one, on a node with more threads than cores: each takes so many times as long."""

    @classmethod
    def from_hardware(cls, shape: ModelShape, hardware: Hardware) -> Costs:
        """By data sheet: peak rates times what is achievable of them."""
        share = hardware.achievable
        bandwidth = hardware.memory_bandwidth * share.memory
        matrix = hardware.peak_flops(shape.compute_dtype) * share.compute
        scores = hardware.peak_flops("bfloat16") * share.compute

        def reached(link: Link) -> Link:
            return Link(link.bandwidth * share.link, link.latency)

        launch = hardware.fixed.launch
        return cls(
            shape=shape,
            linear=Roofline(launch, matrix, bandwidth),
            prefill_attention=Roofline(launch, scores, bandwidth),
            decode_attention=Roofline(launch, scores, bandwidth),
            experts=Roofline(2 * launch, matrix, bandwidth),
            host=reached(hardware.host),
            back=reached(hardware.host),
            local=reached(hardware.local),
            remote=reached(hardware.remote),
            disk=reached(hardware.disk),
            layer_fixed=hardware.fixed.layer,
            step_fixed=hardware.fixed.step,
            ranks_per_node=hardware.devices_per_node,
        )

    def sharing(self, ranks_a_core: float) -> Costs:
        """The same where `ranks_a_core` ranks share what these costs have for one: all that computes takes longer."""
        times = max(ranks_a_core, 1.0) / self.ranks_a_core
        if times == 1:
            return self
        kernels = {
            name: getattr(self, name).slower(times)
            for name in ("linear", "prefill_attention", "decode_attention", "experts")
        }
        fixed = {
            name: getattr(self, name) * times
            for name in ("layer_fixed", "token_fixed", "weight_fixed", "page_fixed", "row_fixed", "step_fixed")
        }
        return replace(self, **kernels, **fixed, ranks_a_core=max(ranks_a_core, 1.0))

    def with_budget(self) -> Costs:
        """The same where parameters and KV must be copied to a part of memory that plays the device."""
        return replace(self, streamed=True)

    def attention_decode_seconds(self, sequences: float, context: float) -> float:
        """Attention part of one layer: `sequences` new tokens over `context` tokens of KV in all."""
        if sequences <= 0:
            return 0.0
        return (
            self.linear.seconds(work.projections(self.shape, sequences))
            + self.weight_fixed * self.shape.attention_bytes
            + self.decode_attention.seconds(work.decode_attention(self.shape, context, sequences))
            + self.token_fixed * sequences
        )

    def attention_prefill_seconds(self, tokens: float, length: float) -> float:
        """Attention part of one layer for a microbatch of `tokens` tokens, of prompts `length` tokens long."""
        return (
            self.linear.seconds(work.projections(self.shape, tokens))
            + self.weight_fixed * self.shape.attention_bytes
            + self.prefill_attention.seconds(work.prefill_attention(self.shape, tokens, length))
            + self.token_fixed * tokens
        )

    def dense_seconds(self, tokens: float) -> float:
        """The MLP of a dense layer, for one rank's tokens."""
        if tokens <= 0:
            return 0.0
        weights = self.shape.dense_parameters * self.shape.weight_bytes
        return self.linear.seconds(work.dense_mlp(self.shape, tokens)) + self.weight_fixed * weights

    def experts_seconds(self, own_tokens: float, all_tokens: float, ranks: int) -> float:
        """Routed experts of this rank for the tokens of all ranks, and the shared ones for its own."""
        seconds = 0.0
        if all_tokens > 0:
            weights = work.chosen_experts(self.shape, all_tokens, ranks) * self.shape.expert_parameters
            seconds += self.experts.seconds(work.routed_experts(self.shape, all_tokens, ranks))
            seconds += self.weight_fixed * weights * self.shape.expert_bytes
        if self.shape.shared_parameters and own_tokens > 0:
            seconds += self.linear.seconds(work.shared_experts(self.shape, own_tokens))
        return seconds

    def exchange_seconds(self, tokens: float, ranks: int) -> float:
        """Dispatch of a rank's tokens to the experts of `ranks` ranks; combine takes as long."""
        if ranks < 2 or not self.shape.experts or tokens <= 0:
            return 0.0
        nodes = -(-ranks // self.ranks_per_node)
        inside = self.local.seconds(work.dispatched_bytes(self.shape, tokens, min(ranks, self.ranks_per_node)))
        across = self.remote.seconds(work.dispatched_bytes(self.shape, tokens, nodes)) if nodes > 1 else 0.0
        return max(inside, across)

    def split_step_seconds(self, context: float, ranks: int) -> float:
        """A step of one sequence by `ranks` ranks at once (PARTITION): each has its share of every layer's weights.

        Partial sums are added up twice a layer.
        """
        shape, share = self.shape, 1 / ranks
        link = self.local if ranks <= self.ranks_per_node else self.remote
        layer = self.linear.seconds(work.projections(shape, 1) * share)
        layer += self.decode_attention.seconds(work.decode_attention(shape, context, 1) * share) + self.layer_fixed
        layer += 2 * link.seconds(2 * shape.hidden * work.ACTIVATION_BYTES) + self.token_fixed
        experts = self.experts.seconds(work.routed_experts(shape, 1) * share) if shape.experts else 0.0
        experts += self.linear.seconds(work.shared_experts(shape, 1) * share) if shape.shared_parameters else 0.0
        dense = self.linear.seconds(work.dense_mlp(shape, 1) * share)
        head = self.linear.seconds(work.head(shape, 1) * share) + self.row_fixed
        return shape.layers * layer + shape.moe_layers * experts + shape.dense_layers * dense + head + self.step_fixed

    def head_seconds(self, rows: float) -> float:
        """Logits of `rows` tokens, and one sampled from each."""
        if rows <= 0:
            return 0.0
        fixed = self.weight_fixed * self.shape.head_bytes + self.row_fixed * rows
        return self.linear.seconds(work.head(self.shape, rows)) + fixed

    def layer_kv_seconds(self, link: Link, tokens: float, sequences: float) -> float:
        """To copy the KV of `tokens` tokens of so many sequences in one layer, page by page."""
        if not self.streamed or tokens <= 0:
            return 0.0
        pages = tokens / PAGE_TOKENS + sequences / 2
        return link.seconds(tokens * self.shape.attention.kv_elements * self.shape.kv_bytes) + self.page_fixed * pages

    def kv_seconds(self, tokens: float) -> float:
        """To load, or to write back, the KV of `tokens` tokens in all layers."""
        return self.host.seconds(tokens * self.shape.kv_token_bytes) if self.streamed else 0.0

    def migrate_seconds(self, tokens: float) -> float:
        """To pull the KV of `tokens` tokens from the host store of another node."""
        return (self.window or self.remote).seconds(tokens * self.shape.kv_token_bytes)

    def load_seconds(self, tokens: float) -> float:
        """To read the KV of `tokens` tokens from a checkpoint."""
        return self.disk.seconds(tokens * self.shape.kv_token_bytes)

    def recompute_seconds(self, tokens: float) -> float:
        """To prefill `tokens` tokens of a sequence again as a part of a large wave: its work, without fixed costs."""
        shape = self.shape
        weights = shape.active_parameters - shape.vocabulary * shape.hidden
        pairs = shape.layers * tokens * shape.attention.context(tokens / 2)
        return (
            2 * weights * tokens / self.linear.flops_per_second
            + shape.attention.prefill_flops * pairs / self.prefill_attention.flops_per_second
        )
