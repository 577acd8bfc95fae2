"""`SamplingParams` as vLLM's users know them; they become fields of a request, and the batch room checks them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

_SAME_NAME = (
    "n", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop_token_ids", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "logit_bias", "ignore_eos", "prompt_logprobs",
    "prompt_logprobs_start",
    "structured_outputs",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen. Names, meaning and defaults are vLLM's; what it has beside these is not supported."""

    n: int = 1
    """Samples of each prompt."""
    max_tokens: int | None = 16
    """Most tokens to generate; None: what the context leaves."""
    min_tokens: int = 0
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """-1 and 0 keep all tokens."""
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    """How many of the most likely tokens get their log-probability, beside the chosen one; None: not even that."""
    prompt_logprobs: int | None = None
    """As `logprobs`, for the tokens of the prompt."""
    prompt_logprobs_start: int | None = None
    """First position of the prompt that is scored (not one of vLLM's: scoring an answer needs no more)."""
    structured_outputs: Mapping[str, Any] | None = None
    """What the text must conform to: one of json, regex, choice, grammar and json_object."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None

    def completion_fields(self) -> dict[str, Any]:
        """As fields of a request for `/v1/completions`."""
        return self._common() | {"max_tokens": self.max_tokens, "logprobs": self.logprobs}

    def chat_fields(self) -> dict[str, Any]:
        """As fields of a request for `/v1/chat/completions`."""
        chosen = self._common() | {"max_completion_tokens": self.max_tokens}
        if self.logprobs is not None:
            chosen |= {"logprobs": True, "top_logprobs": self.logprobs}
        return chosen

    def _common(self) -> dict[str, Any]:
        """Only what differs from the defaults, so that an error names a field that the caller wrote."""
        chosen = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name in _SAME_NAME and getattr(self, field.name) != field.default
        }
        if self.stop is not None:
            chosen["stop"] = self.stop if isinstance(self.stop, str) else list(self.stop)
        return chosen
