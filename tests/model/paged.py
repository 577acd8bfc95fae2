"""A small paged runner for tests: sequences whose tokens go through a `CausalModel` in any mixture of chunks."""

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from hpcgen.kernels.attention.interface import AttentionBatch, KVPages
from hpcgen.kernels.attention.kv_layout import KVLayout
from hpcgen.kernels.attention.torch_reference import TorchAttention
from hpcgen.kernels.experts.torch_reference import TorchExperts
from hpcgen.kernels.layouts import StoredTensor
from hpcgen.model.causal import CausalModel
from hpcgen.model.forward_context import ForwardContext
from hpcgen.sequence import PAGE_TOKENS


def stored(tensor: torch.Tensor) -> StoredTensor:
    return StoredTensor(tensor, tuple(tensor.shape))


def stored_weights(model: PreTrainedModel) -> dict[str, StoredTensor]:
    return {name: stored(tensor) for name, tensor in model.state_dict().items()}


def bound_model(model: PreTrainedModel, model_type: str, dtype: torch.dtype) -> CausalModel:
    """A CausalModel with the weights of a transformers model."""
    config = type(model.config).from_dict(model.config.to_dict())
    causal = CausalModel.from_config(model_type, config, dtype, torch.device("cpu"), TorchExperts())
    weights = stored_weights(model)
    for unit in causal.units:
        causal.bind(unit, weights)
    return causal


class PagedRunner:
    """Keeps the KV pages and lengths of sequences, and runs chunks of their tokens."""

    def __init__(self, model: CausalModel, sequences: int, pages: int = 64, layout: KVLayout | None = None) -> None:
        self.model = model
        self.attention = TorchAttention()
        layout = layout or model.kv_layout
        # Not zero: what lies in pages beyond a context must not matter.
        self.pages = torch.full((pages, layout.page_bytes), 0x7F, dtype=torch.uint8)
        self.kv: list[KVPages] = layout.views(self.pages)
        self.free = list(range(pages))[::-1]
        self.tables: list[list[int]] = [[] for _ in range(sequences)]
        self.lengths = [0] * sequences

    def take_pages_from(self, other: "PagedRunner", convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Goes on with the sequences of another runner, whose pages `convert` brings into the layout of this one."""
        self.pages.copy_(convert(other.pages))
        self.free = list(other.free)
        self.tables = [list(table) for table in other.tables]
        self.lengths = list(other.lengths)

    def context(self, chunks: dict[int, torch.Tensor]) -> ForwardContext:
        """The context of a forward of `chunks`, sequence to its next tokens; the sequences grow by them."""
        positions, slots, offsets = [], [], [0]
        for sequence, tokens in chunks.items():
            table = self.tables[sequence]
            start, stop = self.lengths[sequence], self.lengths[sequence] + len(tokens)
            while len(table) * PAGE_TOKENS < stop:
                table.append(self.free.pop())
            positions += range(start, stop)
            slots += [table[p // PAGE_TOKENS] * PAGE_TOKENS + p % PAGE_TOKENS for p in range(start, stop)]
            offsets.append(offsets[-1] + len(tokens))
            self.lengths[sequence] = stop
        width = max(len(self.tables[s]) for s in chunks)
        batch = AttentionBatch(
            query_offsets=torch.tensor(offsets, dtype=torch.int32),
            context_lengths=torch.tensor([self.lengths[s] for s in chunks], dtype=torch.int32),
            page_table=torch.tensor(
                [self.tables[s] + [0] * (width - len(self.tables[s])) for s in chunks], dtype=torch.int32
            ),
            positions=torch.tensor(positions),
            slots=torch.tensor(slots),
        )
        self.attention.plan(batch)
        return ForwardContext(batch, self.attention, self.kv.__getitem__)

    def run(self, chunks: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        """Logits [t, V] of every token of each chunk."""
        context = self.context(chunks)
        ids = torch.cat(list(chunks.values()))
        logits = self.model.forward(self.model.embed(ids), context, torch.arange(len(ids)))
        return list(logits.split([len(tokens) for tokens in chunks.values()]))


def run_plan(runner: PagedRunner, tokens: Sequence[torch.Tensor], plan: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Runs each row of `plan` (new tokens of each sequence, 0 for none) as one forward; logits [t, V] by sequence."""
    logits: list[list[torch.Tensor]] = [[] for _ in tokens]
    for row in plan:
        chunks = {
            s: tokens[s][runner.lengths[s] : runner.lengths[s] + count]
            for s, count in enumerate(row)
            if count and runner.lengths[s] < len(tokens[s])
        }
        for sequence, part in zip(chunks, runner.run(chunks), strict=True):
            logits[sequence].append(part)
    return [torch.cat(parts) for parts in logits]
