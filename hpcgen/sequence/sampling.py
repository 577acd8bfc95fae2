"""How the tokens of one sequence are chosen. Plain data: the sampler is in `engine`."""

from dataclasses import dataclass
from typing import Literal, NamedTuple


class Grammar(NamedTuple):
    """What the text of a sequence must conform to; equal ones are compiled once."""

    kind: Literal["json_schema", "regex", "ebnf"]
    text: str
    """The schema as JSON, the regular expression, or the rules, of which `root` is the first."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling options of one sequence, in the meaning of the OpenAI API and of vLLM's extensions to it."""

    max_tokens: int
    """Most tokens to generate, already cut to what the context length leaves."""
    min_tokens: int = 0
    """No stop token and no stop string ends the sequence before this many tokens."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    min_p: float = 0.0
    key: int = 0
    """Unsigned 64-bit key of the sequence's random numbers, made from the seed and the sequence's identity.
    The number drawn at position p depends on (key, p) alone (Philox, Salmon et al., SC'11)."""
    stop: tuple[str, ...] = ()
    """Stop strings; the text is cut before the first one."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the sequence; the model's end-of-sequence tokens among them unless the request ignores them."""
    logprobs: int | None = None
    """None: no log-probabilities. k: those of the chosen token and of the k most likely ones."""
    prompt_logprobs: int | None = None
    """As `logprobs`, for the tokens of the prompt."""
    prompt_logprobs_start: int = 1
    """First position of the prompt whose token is scored. The token at 0 has none before it, and no probability."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: Grammar | None = None
    """Only tokens that can go on to a text of the grammar are drawn, and stop tokens only where one is complete."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0
