from array import array
from typing import Any

import torch
from transformers import RepetitionPenaltyLogitsProcessor

from hpcgen.engine.penalties import adjust
from hpcgen.sequence import SamplingParams, Sequence


def adjusted(logits: torch.Tensor, prompt: list[int], output: list[int], **options: Any) -> torch.Tensor:
    sampling = SamplingParams(max_tokens=100, **options)
    return adjust(logits[None].clone(), [Sequence(0, 0, 0, array("I", prompt), sampling, array("I", output))])[0]


LOGITS = torch.tensor([2.0, -1.0, 0.5, 3.0])


def test_repetition_penalty_is_that_of_transformers() -> None:
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([[0, 1, 1]]), LOGITS[None].clone())[0]
    torch.testing.assert_close(adjusted(LOGITS, [0], [1, 1], repetition_penalty=1.3), expected)


def test_presence_and_frequency_penalties_count_the_output_alone() -> None:
    result = adjusted(LOGITS, [3, 3], [0, 2, 2], presence_penalty=0.5, frequency_penalty=0.25)
    torch.testing.assert_close(result, LOGITS - torch.tensor([0.75, 0.0, 1.0, 0.0]))


def test_biases_are_added_and_those_beyond_the_vocabulary_ignored() -> None:
    result = adjusted(LOGITS, [0], [], logit_bias=((1, 5.0), (99, 1.0)))
    torch.testing.assert_close(result, LOGITS + torch.tensor([0.0, 5.0, 0.0, 0.0]))


def test_stop_tokens_are_impossible_until_the_least_number_of_tokens() -> None:
    options = {"stop_token_ids": (3,), "min_tokens": 2}
    assert adjusted(LOGITS, [0], [1], **options)[3] == float("-inf")
    assert adjusted(LOGITS, [0], [1, 1], **options)[3] == 3.0


def test_a_row_without_wishes_keeps_its_logits_beside_one_that_has_some() -> None:
    plain = Sequence(0, 0, 0, array("I", [0]), SamplingParams(max_tokens=9))
    biased = Sequence(1, 0, 0, array("I", [0]), SamplingParams(max_tokens=9, logit_bias=((0, -50.0),)))
    logits = torch.stack([LOGITS, LOGITS])
    result = adjust(logits, [plain, biased])
    assert torch.equal(result[0], LOGITS) and result[1, 0] == -48.0
    assert torch.equal(logits[1], LOGITS)
