from array import array
from typing import Any

import pytest
import torch

from hpcgen.engine.sampling import sample
from hpcgen.sequence import SamplingParams, Sequence


def sequence(
    key: int = 0, output: list[int] | None = None, prompt: list[int] | None = None, **options: Any
) -> Sequence:
    sampling = SamplingParams(max_tokens=100, key=key, **options)
    return Sequence(0, 0, 0, array("I", [1]), sampling, output=array("I", output or []))


def frequencies(logits: torch.Tensor, **options: Any) -> torch.Tensor:
    """How often each token is drawn by 4,000 sequences with keys of their own."""
    count = 4000
    tokens = sample(logits.expand(count, -1), [sequence(key=key, **options) for key in range(count)])
    return torch.bincount(torch.tensor(tokens), minlength=logits.shape[-1]) / count


LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 3.0])


def test_greedy_takes_the_most_likely_token() -> None:
    logits = torch.stack([LOGITS, LOGITS.flip(0)])
    assert sample(logits, [sequence(temperature=0.0)] * 2) == [4, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_distribution_at_a_temperature(temperature: float) -> None:
    expected = (LOGITS / temperature).softmax(-1)
    torch.testing.assert_close(frequencies(LOGITS, temperature=temperature), expected, atol=0.03, rtol=0)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 2}, [0, 4]),
        ({"top_p": 0.6}, [4]),
        ({"top_p": 0.7}, [0, 4]),
        ({"top_k": 3, "top_p": 0.95}, [0, 1, 4]),
        ({"min_p": 0.3}, [0, 4]),
        ({"min_p": 0.3, "top_k": 1}, [4]),
        ({"top_p": 1e-9}, [4]),
    ],
)
def test_top_k_top_p_and_min_p_keep_what_they_say_in_the_right_proportion(
    options: dict[str, Any], kept: list[int]
) -> None:
    probabilities = LOGITS.softmax(-1)
    expected = torch.zeros(5)
    expected[kept] = probabilities[kept] / probabilities[kept].sum()
    torch.testing.assert_close(frequencies(LOGITS, temperature=1.0, **options), expected, atol=0.03, rtol=0)


def test_what_a_sequence_draws_does_not_depend_on_what_it_is_batched_with() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(12, 50, generator=generator)
    kinds: list[dict[str, Any]] = [
        {},
        {"top_p": 0.9},
        {"top_k": 5},
        {"min_p": 0.1},
        {"temperature": 0.0},
        {"logprobs": 1},
    ]
    make = [lambda i=i: sequence(key=i, output=[3] * i, **kinds[i % len(kinds)]) for i in range(12)]
    together = sample(logits, [m() for m in make])
    alone = [sample(logits[i : i + 1], [m()])[0] for i, m in enumerate(make)]
    assert together == alone


def test_the_next_position_draws_another_number() -> None:
    flat = torch.zeros(1, 1000)
    drawn = {sample(flat, [sequence(key=1, output=[0] * position)])[0] for position in range(20)}
    assert len(drawn) > 15


def test_logprobs_are_those_of_the_model_whatever_penalties_and_temperature_do() -> None:
    s = sequence(temperature=0.0, logprobs=2, logit_bias=((3, 100.0),))
    assert sample(LOGITS[None], [s]) == [3]
    expected = LOGITS.log_softmax(-1)
    assert s.logprobs[0].logprob == pytest.approx(expected[3].item())
    assert [token for token, _ in s.logprobs[0].top] == [4, 0]
    assert s.logprobs[0].top[1][1] == pytest.approx(expected[0].item())


def test_logprobs_of_the_chosen_token_alone() -> None:
    s = sequence(temperature=0.0, logprobs=0)
    sample(LOGITS[None], [s])
    assert s.logprobs[0].top == () and s.logprobs[0].token == 4
