"""One forward pass over microbatches, as coroutines on the hub, down to sampled tokens."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from hpcgen.coroutine.call import Stage, YieldPoint
from hpcgen.coroutine.hub import Hub
from hpcgen.coroutine.wrapper import DEFAULT_POLICIES, Policy, unwrap, wrap
from hpcgen.engine.microbatch import attention_batch, page_table
from hpcgen.engine.sampling import sample
from hpcgen.engine.scoring import score
from hpcgen.engine.structured import StructuredOutput
from hpcgen.kernels.attention.interface import AttentionBackend
from hpcgen.memory.device import Device
from hpcgen.memory.kv.interface import KVAccess, Span
from hpcgen.model.causal import CausalModel
from hpcgen.model.forward_context import ForwardContext
from hpcgen.model.units import EMBEDDING, HEAD, layer_unit
from hpcgen.sequence import TokenLogprob


@dataclass(slots=True)
class Microbatch:
    """Input of one coroutine: T tokens of its spans, and the spans after whose last token one is sampled."""

    spans: Seq[Span]
    tokens: np.ndarray
    """int64 [T]."""
    starts: np.ndarray
    """int64 [B]: tokens that each sequence has KV for already."""
    stops: np.ndarray
    """int64 [B]."""
    sampled: Seq[int]
    """Indices into `spans`."""
    table: np.ndarray | None = None
    """int32 [B, M], where it is known from an earlier step; else it comes from the KV."""
    scored: dict[int, range] = field(default_factory=dict)
    """Of an index into `spans`, the positions in it after which the next token of the prompt is scored."""
    scores: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    """Filled in by `run`, for what is `scored`."""


class ForwardPass:
    """The wrapped model. `run` is one step (decode) or one sweep (prefill)."""

    def __init__(
        self,
        model: CausalModel,
        device: Device,
        attention: AttentionBackend,
        expert_batch: int,
        policies: dict[Stage, Policy] | None = None,
        structured: StructuredOutput | None = None,
    ):
        """`policies` replace the default ones at the stages they name; `structured`: see `sample`."""
        self._structured = structured
        self._model, self._device, self._attention = model, device, attention
        self._head_unit = HEAD if HEAD in model.units else EMBEDDING
        self.hub = Hub(self._bind, expert_batch)
        chosen = DEFAULT_POLICIES | (policies or {})
        for index in range(model.layers):
            self._wrap(model.layer(index), YieldPoint(index, Stage.ATTENTION), chosen)
            self._wrap(model.experts_stage(index), YieldPoint(index, Stage.EXPERTS), chosen)
        head = model.module.get_submodule(model.family.head)
        self._wrap(head, YieldPoint(model.layers, Stage.HEAD), chosen)

    def _wrap(self, module: nn.Module, point: YieldPoint, policies: dict[Stage, Policy]) -> None:
        # A model that another engine ran before still yields to that one's hub.
        unwrap(module)
        wrap(module, point, self.hub, policies[point.stage])

    @torch.inference_mode()
    def run(self, microbatches: Seq[Microbatch]) -> list[list[int]]:
        """Adds the microbatches' KV and returns the tokens sampled in each, in the order of its `sampled`."""
        # inference_mode leaks between greenlets: it is entered once, outside of them.
        accesses = self._device.kv.access([microbatch.spans for microbatch in microbatches])
        return self.hub.run([self._coroutine(m, access) for m, access in zip(microbatches, accesses, strict=True)])

    def _coroutine(self, microbatch: Microbatch, access: KVAccess) -> Callable[[], list[int]]:
        def forward() -> list[int]:
            model = self._model
            table = page_table(access.tables) if microbatch.table is None else microbatch.table
            batch = attention_batch(microbatch.starts, microbatch.stops, table, model.device)
            self._attention.plan(batch)
            self._device.parameters.require(EMBEDDING)
            hidden = model.embed(torch.from_numpy(microbatch.tokens).to(model.device))
            sampled = batch.query_offsets[1:].long()[list(microbatch.sampled)] - 1
            scored = _scored_rows(microbatch, batch.query_offsets)
            context = ForwardContext(batch, self._attention, access.kv, access.layer_done)
            logits = model.forward(hidden, context, torch.cat([scored, sampled]).to(model.device))
            if len(scored):
                _score(microbatch, logits[: len(scored)])
                logits = logits[len(scored) :]
            sequences = [microbatch.spans[i].sequence for i in microbatch.sampled]
            return sample(logits, sequences, self._structured) if sequences else []

        return forward

    def _bind(self, point: YieldPoint) -> None:
        unit = self._head_unit if point.stage is Stage.HEAD else layer_unit(point.layer)
        self._device.parameters.require(unit)


def _scored_rows(microbatch: Microbatch, offsets: torch.Tensor) -> torch.Tensor:
    """Rows of the microbatch's tokens after which a token is scored, int64 [S]. offsets [B + 1]."""
    rows = [
        torch.arange(positions.start, positions.stop) - microbatch.spans[i].start + int(offsets[i])
        for i, positions in microbatch.scored.items()
    ]
    return torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64)


def _score(microbatch: Microbatch, logits: torch.Tensor) -> None:
    """logits [S, V] of the scored rows, in the order of `scored`."""
    start = 0
    for i, positions in microbatch.scored.items():
        sequence = microbatch.spans[i].sequence
        targets = sequence.prompt[positions.start + 1 : positions.stop + 1]
        rows = logits[start : start + len(positions)]
        microbatch.scores[i] = score(rows, targets, sequence.sampling.prompt_logprobs or 0)
        start += len(positions)
