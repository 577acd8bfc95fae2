"""What `LLM` returns: vLLM's `RequestOutput` and `CompletionOutput`, by their names and fields."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hpcgen.batch.detokenization import Detokenizer
from hpcgen.batch.request import Request
from hpcgen.sequence import Sequence, TokenLogprob


class Logprob(NamedTuple):
    """Log-probability of one token at one place."""

    logprob: float
    rank: int | None
    """1 for the most likely token; None where the chosen token was not among the most likely ones asked for."""
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One sample."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    """At each place of the output, the chosen token and the most likely ones."""
    finish_reason: str | None = None
    """'stop' or 'length'."""
    stop_reason: int | str | None = None
    """The stop string or stop token that ended it; None for the model's own end of text."""


@dataclass(slots=True)
class RequestOutput:
    """All samples of one prompt. One that could not be run has an `error` and no `outputs`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    error: str | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """At each place of the prompt; None where it is not scored."""
    finished: bool = True


def failed(request: Request, error: str) -> RequestOutput:
    """The output of a request that cannot be run."""
    return RequestOutput(request.custom_id, _text(request), [], error=error)


def assembled(
    request: Request, samples: Seq[Sequence], detokenizer: Detokenizer, end_of_sequence: Seq[int]
) -> RequestOutput:
    """The output of a request whose `samples` have all ended, in any order."""
    output = RequestOutput(request.custom_id, _text(request), samples[0].prompt.tolist())
    errors = [sample.error for sample in samples if sample.error is not None]
    if errors:
        output.error = errors[0]
        return output
    ordered = sorted(samples, key=lambda sample: sample.sample)
    if ordered[0].sampling.prompt_logprobs is not None:
        scored = [_logprobs(entry, detokenizer) for entry in ordered[0].prompt_logprobs]
        output.prompt_logprobs = [None] * (len(ordered[0].prompt) - len(scored)) + scored
    for sample in ordered:
        output.outputs.append(_completion(request, sample, detokenizer, end_of_sequence))
    return output


def _completion(
    request: Request, sample: Sequence, detokenizer: Detokenizer, end_of_sequence: Seq[int]
) -> CompletionOutput:
    text = detokenizer.text(sample.output) if sample.text is None else sample.text
    completion = CompletionOutput(
        index=sample.sample,
        text=text,
        token_ids=sample.output.tolist(),
        finish_reason=sample.finish_reason,
        stop_reason=_stop_reason(request, sample, text, detokenizer, end_of_sequence),
    )
    if sample.sampling.logprobs is not None:
        completion.cumulative_logprob = sum(entry.logprob for entry in sample.logprobs)
        completion.logprobs = [_logprobs(entry, detokenizer) for entry in sample.logprobs]
    return completion


def _stop_reason(
    request: Request, sample: Sequence, text: str, detokenizer: Detokenizer, end_of_sequence: Seq[int]
) -> int | str | None:
    if sample.finish_reason != "stop":
        return None
    if sample.text is not None:
        whole = detokenizer.text(sample.output)
        return next((stop for stop in request.body.stop_strings if whole.startswith(text + stop)), None)
    last = sample.output[-1]
    return None if last in end_of_sequence else last


def _logprobs(entry: TokenLogprob, detokenizer: Detokenizer) -> dict[int, Logprob]:
    ranks: dict[int, int | None] = {token: rank for rank, (token, _) in enumerate(entry.top, 1)}
    values = [(entry.token, entry.logprob), *entry.top]
    return {token: Logprob(value, ranks.get(token), _decoded(token, detokenizer)) for token, value in values}


def _decoded(token: int, detokenizer: Detokenizer) -> str:
    return detokenizer.token_bytes(token).decode(errors="replace")


def _text(request: Request) -> str | None:
    prompt: Any = getattr(request.body, "prompt", None)
    return prompt if isinstance(prompt, str) else None
