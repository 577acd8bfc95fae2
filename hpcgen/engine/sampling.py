"""Choosing tokens from logits, for many sequences at once. R rows (sequences), V vocabulary."""

from collections.abc import Sequence as Seq

import numpy as np
import torch

from hpcgen.engine.penalties import adjust, forbids_stops
from hpcgen.engine.random import uniform
from hpcgen.engine.structured import StructuredOutput
from hpcgen.kernels.rows import arg_max
from hpcgen.sequence import Sequence, TokenLogprob


def sample(logits: torch.Tensor, sequences: Seq[Sequence], structured: StructuredOutput | None = None) -> list[int]:
    """The next token of each sequence. `logits` [R, V] are those after its last token; they may be
    overwritten.

    Log-probabilities, where asked for, are of the model's own distribution, before penalties, grammar and temperature,
    and are appended to `Sequence.logprobs`. `structured` is needed where a sequence has a grammar.
    """
    if all(_plain(sequence) for sequence in sequences):
        return arg_max(logits).tolist()
    logits = logits.float()
    adjusted = adjust(logits, sequences)
    if structured is not None:
        if adjusted is logits and any(sequence.sampling.logprobs is not None for sequence in sequences):
            adjusted = logits.clone()
        structured.mask(adjusted, sequences)
    tokens = arg_max(adjusted)
    drawn = [row for row, sequence in enumerate(sequences) if not sequence.sampling.greedy]
    if drawn:
        rows = torch.tensor(drawn, device=logits.device)
        tokens[rows] = _draw(adjusted[rows], [sequences[row] for row in drawn])
    chosen = tokens.tolist()
    for row, sequence in enumerate(sequences):
        if sequence.sampling.logprobs is not None:
            sequence.logprobs.append(_token_logprob(logits[row], chosen[row], sequence.sampling.logprobs))
    return chosen


def _plain(sequence: Sequence) -> bool:
    """Whether the arg max of the untouched logits is its next token."""
    s = sequence.sampling
    return (
        s.temperature == 0.0
        and s.logprobs is None
        and s.grammar is None
        and s.presence_penalty == s.frequency_penalty == 0.0
        and s.repetition_penalty == 1.0
        and not s.logit_bias
        and not forbids_stops(sequence)
    )


def _draw(logits: torch.Tensor, sequences: Seq[Sequence]) -> torch.Tensor:
    """Inverse-transform sampling of what temperature, top-k, top-p and min-p leave. [R, V] -> int64 [R].

    Rows are grouped by whether they need sorting, so that a row's result does not depend on the others.
    """
    numbers = torch.from_numpy(
        uniform(
            np.array([sequence.sampling.key for sequence in sequences], dtype=np.uint64),
            np.array([sequence.length for sequence in sequences], dtype=np.uint64),
        )
    ).to(logits.device)
    tokens = torch.empty(len(sequences), dtype=torch.int64, device=logits.device)
    for sort in (False, True):
        group = [i for i, s in enumerate(sequences) if (s.sampling.top_k > 0 or s.sampling.top_p < 1.0) == sort]
        if not group:
            continue
        rows = torch.tensor(group, device=logits.device)
        part = [sequences[i] for i in group]
        scaled = logits[rows] / _column(part, "temperature", logits.device)
        order = None
        if sort:
            scaled, order = scaled.sort(dim=-1, descending=True, stable=True)
        probabilities = scaled.softmax(dim=-1)
        keep = probabilities >= _column(part, "min_p", logits.device) * probabilities.amax(dim=-1, keepdim=True)
        if order is not None:
            keep &= _nucleus(probabilities, part)
        position = _invert(probabilities.masked_fill(~keep, 0.0), numbers[rows])
        tokens[rows] = position if order is None else order.gather(1, position[:, None])[:, 0]
    return tokens


def _nucleus(sorted_probabilities: torch.Tensor, sequences: Seq[Sequence]) -> torch.Tensor:
    """Which of the falling probabilities top-k and then top-p keep; always the first. bool [R, V]."""
    device, vocabulary = sorted_probabilities.device, sorted_probabilities.shape[-1]
    top_k = torch.tensor([s.sampling.top_k or vocabulary for s in sequences], device=device)[:, None]
    kept = torch.arange(vocabulary, device=device)[None] < top_k
    renormalised = sorted_probabilities.masked_fill(~kept, 0.0).double()
    renormalised /= renormalised.sum(dim=-1, keepdim=True)
    before = renormalised.cumsum(dim=-1) - renormalised
    kept &= before < _column(sequences, "top_p", device)
    kept[:, 0] = True
    return kept


def _invert(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Index at which the running sum of `weights` [R, V] first exceeds number * total. int64 [R]."""
    running = weights.double().cumsum(dim=-1)
    index = torch.searchsorted(running, (numbers * running[:, -1])[:, None], right=True)[:, 0]
    # The product can round up to the total itself; the last weight that counts is then meant.
    last = weights.shape[-1] - 1 - (weights > 0).flip(-1).int().argmax(dim=-1)
    return torch.minimum(index, last)


def _column(sequences: Seq[Sequence], name: str, device: torch.device) -> torch.Tensor:
    values = [getattr(sequence.sampling, name) for sequence in sequences]
    return torch.tensor(values, dtype=torch.float32, device=device)[:, None]


def _token_logprob(logits: torch.Tensor, token: int, count: int) -> TokenLogprob:
    """logits [V]."""
    logprobs = logits.log_softmax(dim=-1)
    values, indices = logprobs.topk(count) if count else (logprobs[:0], logprobs[:0])
    top = tuple(zip((int(i) for i in indices.tolist()), values.tolist(), strict=True))
    return TokenLogprob(token, float(logprobs[token]), top)
