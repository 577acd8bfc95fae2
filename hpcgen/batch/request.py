"""Requests of an OpenAI Batch input as typed data: decoding, validation, and the errors that name what is wrong.

Fields and ranges are those of OpenAI's API reference for `/v1/chat/completions` and `/v1/completions`, and of vLLM for
its extensions. Every field is either honoured, known to have no influence on the result, or refused by name.
"""

import json
import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from hpcgen.batch.grammar import ResponseFormat, StructuredOutputs
from hpcgen.batch.messages import AnyMessage
from hpcgen.sequence import Grammar

MAX_SAMPLES = 128
"""Most samples of one request (`n`), the limit of the OpenAI API."""

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
URLS = (CHAT, COMPLETIONS)

_INT64 = Meta(ge=-(2**63), le=2**63 - 1)
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]


class InvalidRequest(ValueError):
    """A request that cannot be run; becomes a RequestError where line and custom_id are known."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class RequestError(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request gets no result: plain data, for the error file. `message` begins with the line number."""

    line: int
    """Line of the input, from 1."""
    code: str
    """Machine-readable, in the style of OpenAI's error codes."""
    message: str
    custom_id: str | None = None
    param: str | None = None
    """The field at fault, where there is one."""
    status: int = 400
    """The HTTP status that an online API would answer with."""

    @classmethod
    def of(cls, error: InvalidRequest, line: int, custom_id: str | None) -> "RequestError":
        return cls(line=line, code=error.code, message=f"line {line}: {error}", custom_id=custom_id, param=error.param)


class Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What both endpoints have in common. None means that the field is absent or null."""

    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    """-1 and 0 keep all tokens."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, _INT64] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[_TokenId] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    logit_bias: dict[_TokenId, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    """Log-probabilities of the prompt's tokens, and of so many of the most likely ones at each place."""
    prompt_logprobs_start: Annotated[int, Meta(ge=1)] | None = None
    """First position that is scored."""
    stream: bool | None = None
    stream_options: Any = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    # Without influence on the result: what OpenAI's service does with them concerns its storage, billing and routing.
    model: str | None = None
    user: str | None = None

    def __post_init__(self) -> None:
        if self.stream or self.stream_options is not None:
            raise ValueError("stream is not supported in a batch: remove stream and stream_options")
        if self.prompt_logprobs_start is not None and self.prompt_logprobs is None:
            raise ValueError("prompt_logprobs_start needs prompt_logprobs")
        if any(not text for text in self.stop_strings):
            raise ValueError("stop must not contain an empty string")
        limit = self.token_limit
        if limit is not None and self.min_tokens is not None and self.min_tokens > limit:
            raise ValueError(f"min_tokens {self.min_tokens} is more than the {limit} of max_tokens")
        if self.grammar is not None:
            for field in ("min_tokens", "stop_token_ids", "ignore_eos"):
                if getattr(self, field):
                    raise ValueError(f"{field} beside structured output is not supported: the grammar ends the text")

    @property
    def grammar(self) -> Grammar | None:
        """What the text must conform to, as it was given."""
        guided = {name: getattr(self, f"guided_{name}") for name in ("json", "regex", "choice", "grammar")}
        found = [StructuredOutputs(**{name: value}).meaning for name, value in guided.items() if value is not None]
        if self.structured_outputs is not None:
            found.append(self.structured_outputs.meaning)
        if self.response_format is not None and self.response_format.grammar is not None:
            found.append(self.response_format.grammar)
        if len(found) > 1:
            raise ValueError("response_format, structured_outputs and guided_*: only one of them may be given")
        return found[0] if found else None

    @property
    def token_limit(self) -> int | None:
        """Most tokens to generate, as far as the request says."""
        return self.max_tokens

    @property
    def samples(self) -> int:
        return self.n or 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class ChatBody(Body, kw_only=True):
    """Body of a request to `/v1/chat/completions`."""

    messages: Annotated[list[AnyMessage], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    """Goes to the chat template; refused where the template knows nothing of it."""
    tools: list[dict[str, Any]] | None = None
    """Shown to the model, unless `tool_choice` is "none"; a call is returned as the text that the model wrote."""
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    modalities: list[str] | None = None
    audio: Any = None
    functions: Any = None
    function_call: Any = None
    web_search_options: Any = None
    verbosity: Any = None

    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prediction: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        if self.tool_choice not in (None, "none", "auto"):
            raise ValueError("tools that must be called are not supported: tool_choice must be 'none' or 'auto'")
        if self.tool_choice == "auto" and not self.tools:
            raise ValueError("tool_choice needs tools")
        if self.modalities not in (None, ["text"]) or self.audio is not None:
            raise ValueError("only the modality 'text' is supported: remove audio and the other modalities")
        for field in ("functions", "function_call", "web_search_options", "verbosity"):
            if getattr(self, field) is not None:
                raise ValueError(f"{field} is not supported")

    @property
    def token_limit(self) -> int | None:
        """`max_completion_tokens` replaces the deprecated `max_tokens`, and holds where both are given."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def logprob_count(self) -> int | None:
        """As SamplingParams.logprobs: None for no log-probabilities, else how many alternatives."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(Body, kw_only=True):
    """Body of a request to `/v1/completions`."""

    prompt: str | list[str | _TokenId | list[_TokenId]]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.echo:
            raise ValueError("echo is not supported: the prompt is in the input already")
        if self.suffix is not None:
            raise ValueError("suffix is not supported")
        if self.best_of is not None and self.best_of != self.samples:
            raise ValueError("best_of is not supported: ask for n samples")
        if isinstance(self.prompt, list):
            if not self.prompt:
                raise ValueError("prompt is empty")
            if not all(isinstance(item, int) for item in self.prompt) and len(self.prompt) > 1:
                raise ValueError("several prompts in one request are not supported: write one request for each")

    @property
    def text_or_tokens(self) -> str | list[int]:
        """The prompt itself: a list of one prompt is that prompt."""
        if isinstance(self.prompt, list) and not isinstance(self.prompt[0], int):
            return self.prompt[0]
        return self.prompt  # type: ignore[return-value]

    @property
    def logprob_count(self) -> int | None:
        """As SamplingParams.logprobs: None for no log-probabilities, else how many alternatives."""
        return self.logprobs


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A valid request of the input."""

    index: int
    """Position in the input, from 0; its line is one more."""
    custom_id: str
    url: str
    body: ChatBody | CompletionBody

    @property
    def line(self) -> int:
        return self.index + 1


class _Envelope(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    custom_id: str | None = None
    method: str | None = None
    url: str | None = None
    body: msgspec.Raw = msgspec.Raw()


class _Identity(msgspec.Struct):
    custom_id: str | None = None


_envelope = msgspec.json.Decoder(_Envelope)
_identity = msgspec.json.Decoder(_Identity)
_bodies: dict[str, msgspec.json.Decoder] = {
    CHAT: msgspec.json.Decoder(ChatBody),
    COMPLETIONS: msgspec.json.Decoder(CompletionBody),
}


def custom_id_of(line: bytes) -> str | None:
    """The `custom_id` of a line, whatever else may be wrong with it; None where there is none."""
    try:
        return _identity.decode(line).custom_id or None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def parse_request(index: int, line: bytes) -> Request:
    """Decode and validate one line.

    Raises:
        InvalidRequest: the line is not a request that we can run.
    """
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            "invalid_utf8", f"not UTF-8: byte {line[error.start]:#04x} at column {error.start + 1}"
        ) from None
    if not text.strip():
        raise InvalidRequest("blank_line", "the line is blank; a line must hold one request")
    envelope = _decode(_envelope, line, line)
    if not envelope.custom_id:
        raise InvalidRequest("missing_custom_id", "custom_id is missing or empty", "custom_id")
    if envelope.method != "POST":
        raise InvalidRequest("invalid_method", f"method must be 'POST', not {envelope.method!r}", "method")
    if envelope.url not in URLS:
        raise InvalidRequest("invalid_url", f"url must be one of {', '.join(URLS)}, not {envelope.url!r}", "url")
    body = bytes(envelope.body)
    if not body:
        raise InvalidRequest("missing_body", "body is missing", "body")
    return Request(
        index=index, custom_id=envelope.custom_id, url=envelope.url, body=_decode(_bodies[envelope.url], body, line)
    )


def _decode(decoder: msgspec.json.Decoder, data: bytes, line: bytes) -> Any:
    """Decode, with msgspec's errors turned into ours: JSON errors by column of `line`, others by field."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at ")
        # The place is `$.a.b[0]`, or `key` in `$.a`; from the body's decoder $ is the body.
        path = re.sub(r"^.*\$\.?|`$", "", place)
        if data is not line:
            path = f"body.{path}".removesuffix(".")
        if field := re.search(r"(unknown|missing required) field `(.*)`", reason):
            path = f"{path}.{field[2]}".removeprefix(".")
            reason = "unknown field" if field[1] == "unknown" else "required, but missing"
        message = reason if path in ("", "body") else f"{path}: {reason}"
        raise InvalidRequest("invalid_request", message, path or None) from None
    except msgspec.DecodeError as error:
        raise InvalidRequest("invalid_json", f"invalid JSON{_place_and_reason(line) or f': {error}'}") from None
    except RecursionError:
        raise InvalidRequest("invalid_json", "invalid JSON: nested too deeply") from None


def _place_and_reason(line: bytes) -> str:
    """The standard library's description of what is wrong: slower than msgspec's, but it tells the column exactly."""
    try:
        json.loads(line.decode())  # bytes would be taken for UTF-16 or UTF-32 where they have zeros
    except json.JSONDecodeError as error:
        return f" at column {error.colno}: {error.msg}"
    except RecursionError:
        return ": nested too deeply"
    except ValueError:  # a number of thousands of digits
        return ""
    return ""  # it lets pass what the standard forbids, such as half of a surrogate pair
