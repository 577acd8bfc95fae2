"""What changes the logits before a token is chosen: penalties, biases, and stop tokens that are not allowed yet."""

from collections import Counter
from collections.abc import Sequence as Seq

import torch

from hpcgen.sequence import Sequence


def adjust(logits: torch.Tensor, sequences: Seq[Sequence]) -> torch.Tensor:
    """Adjusted copy of `logits` float [R, V]; the same tensor where no sequence asks for a change.

    Repetition penalty as in CTRL (Keskar et al., 2019, §4.1), over prompt and output; presence and frequency penalty
    as in the OpenAI API, over the output.
    """
    changed = [row for row, sequence in enumerate(sequences) if _changes(sequence)]
    if not changed:
        return logits
    logits = logits.clone()
    for row in changed:
        _adjust_row(logits[row], sequences[row])
    return logits


def _changes(sequence: Sequence) -> bool:
    s = sequence.sampling
    return bool(
        s.logit_bias
        or s.presence_penalty
        or s.frequency_penalty
        or s.repetition_penalty != 1.0
        or forbids_stops(sequence)
    )


def forbids_stops(sequence: Sequence) -> bool:
    """Whether its next token may be none of its stop tokens."""
    return bool(sequence.sampling.stop_token_ids) and len(sequence.output) < sequence.sampling.min_tokens


def _adjust_row(logits: torch.Tensor, sequence: Sequence) -> None:
    """In place, logits [V]."""
    s = sequence.sampling
    if s.repetition_penalty != 1.0:
        seen = _index(sorted(set(sequence.prompt) | set(sequence.output)), logits)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / s.repetition_penalty, values * s.repetition_penalty)
    if (s.presence_penalty or s.frequency_penalty) and len(sequence.output):
        counts = Counter(sequence.output)
        amounts = torch.tensor(list(counts.values()), dtype=logits.dtype, device=logits.device)
        logits[_index(list(counts), logits)] -= s.presence_penalty + s.frequency_penalty * amounts
    if s.logit_bias:
        biases = [(token, bias) for token, bias in s.logit_bias if token < logits.shape[-1]]
        amounts = torch.tensor([bias for _, bias in biases], dtype=logits.dtype, device=logits.device)
        logits[_index([token for token, _ in biases], logits)] += amounts
    if forbids_stops(sequence):
        logits[_index(list(s.stop_token_ids), logits)] = float("-inf")


def _index(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Tokens within the vocabulary, as an index."""
    return torch.tensor([t for t in tokens if t < logits.shape[-1]], dtype=torch.int64, device=logits.device)
