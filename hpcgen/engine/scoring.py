"""Log-probabilities of given tokens, for the scoring of prompts. S rows, V vocabulary."""

from collections.abc import Sequence as Seq

import torch

from hpcgen.sequence import TokenLogprob

ROWS = 64
"""Rows that are worked on at once: their logits exist a second time, in float32."""


def score(logits: torch.Tensor, targets: Seq[int], count: int) -> list[TokenLogprob]:
    """The log-probability of each target under its row of `logits` [S, V], and the `count` most likely tokens there."""
    wanted = torch.tensor(list(targets), dtype=torch.int64, device=logits.device)
    found: list[TokenLogprob] = []
    for rows, tokens in zip(logits.split(ROWS), wanted.split(ROWS), strict=True):
        logprobs = rows.float().log_softmax(dim=-1)
        chosen = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
        values, indices = logprobs.topk(count, dim=-1)
        for token, logprob, ids, likely in zip(tokens.tolist(), chosen, indices.tolist(), values.tolist(), strict=True):
            found.append(TokenLogprob(token, logprob, tuple(zip(ids, likely, strict=True))))
    return found
