"""From requests to sequences: chat template, tokenization, limits, sampling options and keys of random numbers."""

import hashlib
import json
from array import array
from pathlib import Path
from typing import Any

from hpcgen.batch.grammar import InvalidGrammar, check
from hpcgen.batch.request import MAX_SAMPLES, ChatBody, CompletionBody, InvalidRequest, Request
from hpcgen.errors import HpcgenError
from hpcgen.sequence import Grammar, SamplingParams, Sequence

_RESERVED_TEMPLATE_KWARGS = {
    "chat_template",
    "conversation",
    "max_length",
    "messages",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "sanitize_control_tokens",
    "tokenize",
    "tokenizer_kwargs",
    "tools",
    "truncation",
}


class TokenizerError(HpcgenError):
    """The model directory has no tokenizer that we can use."""


def load_tokenizer(model_directory: str | Path) -> Any:
    """The tokenizer of a Hugging Face model directory, a transformers `PreTrainedTokenizerFast`.

    Raises:
        TokenizerError: there is none, or it is not one of the `tokenizers` library.
    """
    from transformers import AutoTokenizer  # seconds to import, so only where it is used

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model_directory), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        # transformers raises many types here (OSError, ValueError, KeyError, the tokenizers library's bare Exception).
        reason = " ".join(str(error).split())[:500]
        raise TokenizerError(
            f"cannot load a tokenizer from {model_directory}: {reason or type(error).__name__}. A model directory has "
            "tokenizer.json beside config.json"
        ) from None
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise TokenizerError(
            f"{model_directory} has no tokenizer.json and none could be made from what is there; "
            "save one with AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    _check_template(model_directory, tokenizer)
    return tokenizer


def _check_template(model_directory: str | Path, tokenizer: Any) -> None:
    """A template that does not parse would fail every request as if it were the request's fault."""
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import _compile_jinja_template

    templates = tokenizer.chat_template or {}
    try:
        for template in templates.values() if isinstance(templates, dict) else [templates]:
            _compile_jinja_template(template)
    except TemplateSyntaxError as error:
        raise TokenizerError(
            f"the chat template of {model_directory} does not parse: line {error.lineno}: {error.message}"
        ) from None


def end_of_sequence_ids(model_directory: str | Path, tokenizer: Any) -> tuple[int, ...]:
    """All tokens that end a text of this model, from generation_config.json, config.json and the tokenizer."""
    ids: set[int] = set()
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    for name in ("generation_config.json", "config.json"):
        found = _read_config(Path(model_directory) / name).get("eos_token_id")
        ids.update([found] if isinstance(found, int) else found or [])
    return tuple(sorted(ids))


def _read_config(path: Path) -> dict[str, Any]:
    """The text model's part of a config file; empty where there is no such file."""
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"cannot read {path}: {error}") from None
    return config | config.get("text_config", {})


def sampling_key(run_seed: int, request: int, sample: int, request_seed: int | None) -> int:
    """64-bit key of a sequence's random numbers.

    A request with a seed of its own draws the same numbers in whatever run and place it stands.
    """
    identity = f"request {request_seed} {sample}" if request_seed is not None else f"run {run_seed} {request} {sample}"
    return int.from_bytes(hashlib.blake2b(identity.encode(), digest_size=8).digest(), "little")


def sequence_id(request: int, sample: int) -> int:
    """Rises with arrival, and is the same whenever the run is resumed."""
    return request * MAX_SAMPLES + sample


class RequestTokenizer:
    """Makes the sequences of a request.

    Args:
        model_directory: Hugging Face directory with config and tokenizer.
        run_seed: seed of requests that have none of their own.
        max_model_len: most tokens of a sequence, prompt and output together.
    """

    def __init__(self, model_directory: str | Path, run_seed: int, max_model_len: int) -> None:
        self.run_seed = run_seed
        self.max_model_len = max_model_len
        self._tokenizer = load_tokenizer(model_directory)
        self._backend = self._tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        template = self._tokenizer.chat_template
        self._template = " ".join(template.values()) if isinstance(template, dict) else template or ""
        self._eos = end_of_sequence_ids(model_directory, self._tokenizer)
        vocabulary = _read_config(Path(model_directory) / "config.json").get("vocab_size")
        self._vocabulary_size = vocabulary or len(self._tokenizer)
        self._special_ids = {
            token.content: id for id, token in self._tokenizer.added_tokens_decoder.items() if token.special
        }

    def sequences(self, request: Request) -> list[Sequence]:
        """One sequence a sample, in order; they share the prompt's array.

        Raises:
            InvalidRequest: the prompt cannot be made or does not fit, or a token is not in the vocabulary.
        """
        body = request.body
        prompt = self._chat_tokens(body) if isinstance(body, ChatBody) else self._completion_tokens(body)
        room = self.max_model_len - len(prompt)
        if not prompt:
            raise InvalidRequest("empty_prompt", "the prompt has no tokens")
        if room < 1:
            raise InvalidRequest(
                "context_length_exceeded",
                f"the prompt has {len(prompt)} tokens, the context {self.max_model_len}: no room for an answer",
            )
        tokens = array("I", prompt)
        return [
            Sequence(
                id=sequence_id(request.index, sample),
                request=request.index,
                sample=sample,
                prompt=tokens,
                sampling=self._sampling(request, sample, room),
            )
            for sample in range(body.samples)
        ]

    def _sampling(self, request: Request, sample: int, room: int) -> SamplingParams:
        body = request.body
        given = {
            name: value
            for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
            if (value := getattr(body, name)) is not None
        }
        # A special token never shows in the text, so as a stop string it could not match.
        stop = tuple(text for text in body.stop_strings if text not in self._special_ids)
        stop_ids = {self._special_ids[text] for text in body.stop_strings if text in self._special_ids}
        stop_ids.update(self._known(body.stop_token_ids or [], "stop_token_ids"))
        if not body.ignore_eos:
            stop_ids.update(self._eos)
        limit = room if body.token_limit is None else min(body.token_limit, room)
        bias = body.logit_bias or {}
        self._known(bias, "logit_bias")
        return SamplingParams(
            max_tokens=limit,
            min_tokens=min(body.min_tokens or 0, limit),
            top_k=max(body.top_k or 0, 0),
            key=sampling_key(self.run_seed, request.index, sample, body.seed),
            stop=stop,
            stop_token_ids=tuple(sorted(stop_ids)),
            logprobs=body.logprob_count,
            prompt_logprobs=body.prompt_logprobs if sample == 0 else None,
            prompt_logprobs_start=body.prompt_logprobs_start or 1,
            logit_bias=tuple(sorted(bias.items())),
            grammar=self._grammar(body),
            **given,
        )

    def _grammar(self, body: ChatBody | CompletionBody) -> Grammar | None:
        if body.grammar is None:
            return None
        if not self._eos:
            raise InvalidRequest("invalid_grammar", "structured output needs a model with an end-of-sequence token")
        try:
            return check(body.grammar)
        except InvalidGrammar as error:
            raise InvalidRequest("invalid_grammar", f"structured output: {error}", "body.response_format") from None

    def _known(self, tokens: Any, field: str) -> Any:
        for token in tokens:
            if token >= self._vocabulary_size:
                raise InvalidRequest(
                    "invalid_token",
                    f"{field}: token {token} is not in the vocabulary of {self._vocabulary_size}",
                    f"body.{field}",
                )
        return tokens

    def _completion_tokens(self, body: CompletionBody) -> list[int]:
        prompt = body.text_or_tokens
        if isinstance(prompt, str):
            return self._backend.encode(prompt).ids
        return self._known(prompt, "prompt")

    def _chat_tokens(self, body: ChatBody) -> list[int]:
        if not self._template:
            raise InvalidRequest("no_chat_template", "the model has no chat template: use /v1/completions")
        options = dict(body.chat_template_kwargs or {})
        if reserved := sorted(_RESERVED_TEMPLATE_KWARGS & options.keys()):
            raise InvalidRequest(
                "invalid_request", f"chat_template_kwargs may not set {reserved[0]}", "body.chat_template_kwargs"
            )
        if body.reasoning_effort is not None:
            options["reasoning_effort"] = self._understood("reasoning_effort", body.reasoning_effort)
        tools = body.tools if body.tool_choice != "none" else None
        if tools:
            self._understood("tools", tools)
        try:
            messages = [message.for_template() for message in body.messages]
            if "developer" not in self._template:
                # OpenAI's newer name for the system role, which most templates do not know.
                for message in messages:
                    if message["role"] == "developer":
                        message["role"] = "system"
            text = self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, **({"add_generation_prompt": True} | options)
            )
        except Exception as error:
            # A template is code of the model's authors: it raises jinja2 errors, and any other through what it calls.
            raise InvalidRequest("chat_template_error", f"the chat template refused the messages: {error}") from None
        return self._backend.encode(text, add_special_tokens=False).ids

    def _understood(self, name: str, value: Any) -> Any:
        if name not in self._template:
            raise InvalidRequest("invalid_request", f"the model's chat template takes no {name}", f"body.{name}")
        return value
