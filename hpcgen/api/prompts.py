"""Prompts and conversations as requests: what the Python API takes, in the form that the batch room checks."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from hpcgen.api.sampling_params import SamplingParams
from hpcgen.batch.request import CHAT, COMPLETIONS, ChatBody, CompletionBody, Request
from hpcgen.errors import HpcgenError

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or vLLM's `{"prompt": text}` and `{"prompt_token_ids": ids}`."""
Conversation = Sequence[Mapping[str, Any]]
"""Messages with `role` and `content`, as in the OpenAI API."""
Params = SamplingParams | Sequence[SamplingParams] | None


class PromptError(HpcgenError, ValueError):
    """A prompt or its sampling parameters make no request; the message names the prompt's position."""


def completion_bodies(prompts: Iterable[Prompt] | Prompt, params: Params) -> Iterator[dict[str, Any]]:
    """Bodies of requests for `/v1/completions`, one for each prompt, made as they are asked for."""
    for index, prompt, chosen in _paired(_several_prompts(prompts), params):
        yield {"prompt": _prompt(index, prompt), **chosen.completion_fields()}


def chat_bodies(
    conversations: Iterable[Conversation] | Conversation, params: Params, fields: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Bodies of requests for `/v1/chat/completions`; `fields` are further ones, such as `tools`."""
    for _, conversation, chosen in _paired(_several_conversations(conversations), params):
        yield {"messages": list(conversation), **fields, **chosen.chat_fields()}


def request(number: int, url: str, body: dict[str, Any], index: int) -> Request:
    """A checked request.

    Args:
        number: its position among all of the engine.
        index: its position in the call, for the message.

    Raises:
        PromptError: a field is wrong.
    """
    assert url in (CHAT, COMPLETIONS)
    kind: type[ChatBody] | type[CompletionBody] = ChatBody if url == CHAT else CompletionBody
    try:
        checked = msgspec.convert(body, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise PromptError(f"prompt {index}: {error}") from None
    return Request(index=number, custom_id=str(number), url=url, body=checked)


def _several_prompts(prompts: Iterable[Prompt] | Prompt) -> Iterable[Any]:
    """One prompt is a list of one."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, Sequence) and prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]
    return prompts  # type: ignore[return-value]


def _several_conversations(conversations: Iterable[Conversation] | Conversation) -> Iterable[Any]:
    """One conversation is a list of one."""
    if isinstance(conversations, Sequence) and conversations and isinstance(conversations[0], Mapping):
        return [conversations]
    return conversations  # type: ignore[return-value]


def _paired(inputs: Iterable[Any], params: Params) -> Iterator[tuple[int, Any, SamplingParams]]:
    if params is None or isinstance(params, SamplingParams):
        shared = params or SamplingParams()
        yield from ((index, item, shared) for index, item in enumerate(inputs))
        return
    inputs = list(inputs)
    if len(inputs) != len(params):
        raise PromptError(f"{len(inputs)} prompts, but {len(params)} sampling parameters: give one, or one for each")
    yield from ((index, item, chosen) for index, (item, chosen) in enumerate(zip(inputs, params, strict=True)))


def _prompt(index: int, prompt: Any) -> Any:
    if isinstance(prompt, Mapping):
        unknown = prompt.keys() - {"prompt", "prompt_token_ids"}
        if unknown:
            raise PromptError(f"prompt {index}: {sorted(unknown)[0]!r} is not supported")
        prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Sequence) or hasattr(prompt, "tolist"):
        return [int(token) for token in prompt]
    raise PromptError(f"prompt {index}: {type(prompt).__name__} is no prompt; give text or token ids")
