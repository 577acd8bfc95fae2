"""Lines of the output and error files: OpenAI Batch lines around `chat.completion` and `text_completion` objects."""

import hashlib
from collections.abc import Iterable
from typing import Any

import msgspec

from hpcgen.batch.detokenization import Detokenizer, text_offsets
from hpcgen.batch.request import ChatBody, Request, RequestError
from hpcgen.sequence import Sequence, TokenLogprob

LOWEST_LOGPROB = -9999.0
"""What the OpenAI API writes for a token that is all but impossible; JSON has no infinity."""


def output_line(
    run_id: str, request: Request, samples: list[Sequence], detokenizer: Detokenizer, model: str, created: int
) -> bytes:
    """The line of a finished request.

    Args:
        run_id: makes the ids differ from those of other runs.
        samples: all of the request's sequences, in order, finished.
        model: name to report where the request gives none.
        created: Unix time, in seconds.
    """
    chat = isinstance(request.body, ChatBody)
    token = _identifier(run_id, request.index)
    texts = [detokenizer.text(sample.output) if sample.text is None else sample.text for sample in samples]
    completion_tokens = sum(len(sample.output) for sample in samples)
    prompt_tokens = len(samples[0].prompt)
    body = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{token}",
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": request.body.model or model,
        "choices": [
            (_chat_choice if chat else _completion_choice)(sample, text, detokenizer)
            for sample, text in zip(samples, texts, strict=True)
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }
    return _line(token, request.custom_id, 200, body, None)


def error_line(run_id: str, index: int, error: RequestError) -> bytes:
    """The line of a failed request: the error as an online API would answer it, and at `error` with the line number."""
    detail = {
        "message": error.message,
        "type": "invalid_request_error" if error.status < 500 else "server_error",
        "param": error.param,
        "code": error.code,
    }
    summary = {"code": error.code, "message": error.message, "param": error.param, "line": error.line}
    return _line(_identifier(run_id, index), error.custom_id, error.status, {"error": detail}, summary)


def unexecuted_line(run_id: str, index: int, custom_id: str | None, code: str, message: str) -> bytes:
    """The line of a request that was not run: as OpenAI writes it, without a response."""
    error = {"code": code, "message": message}
    line = {"id": f"batch_req_{_identifier(run_id, index)}", "custom_id": custom_id, "response": None, "error": error}
    return msgspec.json.encode(line)


def _line(token: str, custom_id: str | None, status: int, body: dict[str, Any], error: dict[str, Any] | None) -> bytes:
    return msgspec.json.encode(
        {
            "id": f"batch_req_{token}",
            "custom_id": custom_id,
            "response": {"status_code": status, "request_id": f"req_{token}", "body": body},
            "error": error,
        }
    )


def _identifier(run_id: str, index: int) -> str:
    """Unique, and the same when the request is run again after a crash."""
    return hashlib.blake2b(f"{run_id} {index}".encode(), digest_size=16).hexdigest()


def _chat_choice(sample: Sequence, text: str, detokenizer: Detokenizer) -> dict[str, Any]:
    logprobs = None
    if sample.sampling.logprobs is not None:
        content = [
            _chat_token(entry.token, entry.logprob, detokenizer)
            | {"top_logprobs": [_chat_token(token, logprob, detokenizer) for token, logprob in entry.top]}
            for entry in sample.logprobs
        ]
        logprobs = {"content": content, "refusal": None}
    return {
        "index": sample.sample,
        "message": {"role": "assistant", "content": text, "refusal": None},
        "logprobs": logprobs,
        "finish_reason": sample.finish_reason,
        **_prompt_logprobs(sample, detokenizer),
    }


def _chat_token(token: int, logprob: float, detokenizer: Detokenizer) -> dict[str, Any]:
    data = detokenizer.token_bytes(token)
    return {"token": data.decode(errors="replace"), "logprob": max(logprob, LOWEST_LOGPROB), "bytes": list(data)}


def _completion_choice(sample: Sequence, text: str, detokenizer: Detokenizer) -> dict[str, Any]:
    logprobs = None
    if sample.sampling.logprobs is not None:
        in_text = (
            b"" if detokenizer.is_special(entry.token) else detokenizer.token_bytes(entry.token)
            for entry in sample.logprobs
        )
        logprobs = {
            "tokens": [_completion_token(entry.token, detokenizer) for entry in sample.logprobs],
            "token_logprobs": [max(entry.logprob, LOWEST_LOGPROB) for entry in sample.logprobs],
            "top_logprobs": [_completion_alternatives(entry, detokenizer) for entry in sample.logprobs],
            "text_offset": text_offsets(in_text),
        }
    return {
        "index": sample.sample,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": sample.finish_reason,
        **_prompt_logprobs(sample, detokenizer),
    }


def _prompt_logprobs(sample: Sequence, detokenizer: Detokenizer) -> dict[str, Any]:
    """vLLM's field: for each prompt token, itself and the most likely ones by id; null where it is not scored."""
    if sample.sampling.prompt_logprobs is None:
        return {}
    unscored: list[Any] = [None] * (len(sample.prompt) - len(sample.prompt_logprobs))
    scored = [
        {
            str(token): {"logprob": max(logprob, LOWEST_LOGPROB), "decoded_token": _text_of(token, detokenizer)}
            for token, logprob in [(entry.token, entry.logprob), *entry.top]
        }
        for entry in sample.prompt_logprobs
    ]
    return {"prompt_logprobs": unscored + scored}


def _text_of(token: int, detokenizer: Detokenizer) -> str:
    return detokenizer.token_bytes(token).decode(errors="replace")


def _completion_alternatives(entry: TokenLogprob, detokenizer: Detokenizer) -> dict[str, float]:
    """The most likely tokens and the chosen one, which may be one more than asked for, as in the OpenAI API."""
    alternatives: Iterable[tuple[int, float]] = [*entry.top, (entry.token, entry.logprob)]
    return {_completion_token(token, detokenizer): max(logprob, LOWEST_LOGPROB) for token, logprob in alternatives}


def _completion_token(token: int, detokenizer: Detokenizer) -> str:
    """The token's text; a part of a character as `bytes:\\xe2\\x82`, so that different tokens stay different."""
    data = detokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
