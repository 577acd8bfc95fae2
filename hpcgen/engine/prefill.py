"""Executes a wave: the prompts of many sequences in one sweep over the layers."""

from collections.abc import Sequence as Seq

import numpy as np

from hpcgen.engine.forward import ForwardPass, Microbatch
from hpcgen.engine.microbatch import pack
from hpcgen.memory.kv.interface import Span


def run_wave(forward: ForwardPass, spans: Seq[Span], tokens: int, pages: int) -> list[tuple[Span, int]]:
    """Computes the KV of all spans, scores their prompts where asked to, and samples where a span ends the prompt of a
    fresh sequence. A microbatch has as many rows of logits at most as it has tokens, which its memory is planned for.

    `tokens`, `pages`: size of a microbatch. Returns (last span of the sequence in the wave, sampled token).
    """
    microbatches = [_microbatch(part) for part in pack(spans, tokens, pages)]
    result = []
    for microbatch, chosen in zip(microbatches, forward.run(microbatches), strict=True):
        result += [(microbatch.spans[i], token) for i, token in zip(microbatch.sampled, chosen, strict=True)]
        for i, scores in microbatch.scores.items():
            microbatch.spans[i].sequence.prompt_logprobs += scores
    return result


def _microbatch(spans: Seq[Span]) -> Microbatch:
    return Microbatch(
        spans=spans,
        tokens=np.concatenate([np.array(s.sequence.tokens(s.start, s.stop), dtype=np.int64) for s in spans]),
        starts=np.array([s.start for s in spans], dtype=np.int64),
        stops=np.array([s.stop for s in spans], dtype=np.int64),
        # One that was generated before, and lost its KV, knows its next token already.
        sampled=[i for i, s in enumerate(spans) if s.stop == s.sequence.prefill_target and not s.sequence.output],
        scored={i: positions for i, s in enumerate(spans) if (positions := _scored(s))},
    )


def _scored(span: Span) -> range:
    """Positions in the span after which the prompt's next token is to be scored, and was not before it lost its KV."""
    sequence = span.sequence
    if sequence.sampling.prompt_logprobs is None:
        return range(0)
    first = max(sequence.sampling.prompt_logprobs_start, 1) + len(sequence.prompt_logprobs)
    return range(max(span.start, first - 1), min(span.stop, len(sequence.prompt) - 1))
