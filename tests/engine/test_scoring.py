import pytest
import torch

from hpcgen.engine.scoring import ROWS, score
from hpcgen.sequence import Sequence
from tests.engine.running import Memory, TinyModel, prompts, run, sequences


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel("llama", tmp_path_factory.mktemp("models"))


def reference(model: TinyModel, prompt: list[int]) -> torch.Tensor:
    """transformers' log-probabilities of tokens 1, 2, ... of a prompt."""
    with torch.inference_mode():
        logprobs = model.reference(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    return logprobs[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]


def scored(batch: list[Sequence]) -> list[torch.Tensor]:
    return [torch.tensor([entry.logprob for entry in s.prompt_logprobs]) for s in batch]


def test_scores_are_those_of_the_whole_softmax_with_the_most_likely_beside() -> None:
    logits = torch.randn(2 * ROWS + 3, 50, generator=torch.Generator().manual_seed(1))
    targets = torch.arange(len(logits)) % 50
    logprobs = logits.log_softmax(-1)
    for row, entry in enumerate(score(logits, targets.tolist(), 2)):
        assert entry.token == targets[row]
        assert entry.logprob == pytest.approx(float(logprobs[row, entry.token]), abs=1e-6)
        assert [token for token, _ in entry.top] == logprobs[row].topk(2).indices.tolist()


def test_no_alternatives_are_given_where_none_are_wanted() -> None:
    assert score(torch.zeros(1, 4), [2], 0)[0].top == ()


@pytest.mark.parametrize("memory", ["in place", "streamed parameters and KV"])
def test_prompts_are_scored_as_transformers_scores_them_however_long_they_are(model: TinyModel, memory: Memory) -> None:
    """Prompts of up to 180 tokens span several microbatches (48 tokens) and waves (100 tokens)."""
    given = prompts((1, 2, 47, 48, 49, 180, 99))
    batch = sequences(given, max_tokens=1, prompt_logprobs=1)
    run(model.assemble(memory), batch)
    for prompt, found in zip(given, scored(batch), strict=True):
        torch.testing.assert_close(found, reference(model, prompt), atol=1e-4, rtol=0)


def test_only_what_comes_after_the_start_is_scored(model: TinyModel) -> None:
    given = prompts((70, 20))
    batch = sequences(given, max_tokens=1, prompt_logprobs=0, prompt_logprobs_start=60)
    run(model.assemble(), batch)
    torch.testing.assert_close(scored(batch)[0], reference(model, given[0])[59:], atol=1e-4, rtol=0)
    assert scored(batch)[1].numel() == 0


def test_scoring_changes_nothing_of_what_is_generated(model: TinyModel) -> None:
    plain, also_scored = sequences(prompts((30, 60))), sequences(prompts((30, 60)), prompt_logprobs=2)
    run(model.assemble(), plain)
    run(model.assemble(), also_scored)
    assert [s.output for s in plain] == [s.output for s in also_scored]


def test_a_prompt_that_lost_its_kv_is_not_scored_twice(model: TinyModel) -> None:
    given = prompts((5, 9, 30, 2, 60, 11))
    batch = sequences(given, max_tokens=100, prompt_logprobs=0)
    page_bytes = model.assemble().model.kv_layout.page_bytes
    assembly = model.assemble(host_memory=7 * page_bytes, decision_steps=20)
    run(assembly, batch)
    assert assembly.engine.activity.discarded > 0
    for prompt, found in zip(given, scored(batch), strict=True):
        torch.testing.assert_close(found, reference(model, prompt), atol=1e-4, rtol=0)
