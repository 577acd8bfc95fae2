"""Our model of the harness against its own `hf` model, in float32."""

import pytest

lm_eval = pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.api.registry import get_model  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from hpcgen.evaluation.harness import EvaluationError, HpcgenLM, _sampling  # noqa: E402

MAX_LENGTH = 60
WORDS = "the quick brown fox jumps over the lazy dog, and stops "


@pytest.fixture(scope="module")
def ours(directory, cache):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPCGEN_CACHE", str(cache))
        yield HpcgenLM(str(directory), dtype="float32", max_length=MAX_LENGTH, host_memory=64 << 20)


@pytest.fixture(scope="module")
def theirs(directory):
    return HFLM(pretrained=str(directory), dtype="float32", device="cpu", max_length=MAX_LENGTH, batch_size=1)


def instances(kind, arguments):
    return [Instance(request_type=kind, doc={}, arguments=args, idx=i) for i, args in enumerate(arguments)]


def test_the_harness_finds_the_model_by_its_name():
    assert get_model("hpcgen") is HpcgenLM


def test_continuations_are_scored_as_by_the_hf_model(ours, theirs):
    pairs = [
        ("the quick", " brown fox"),
        ("the quick ", "brown"),
        ("", "the lazy dog"),
        ("jumps over", " the lazy dog, and stops" * 3),
        (WORDS * 12, "the end"),
    ]
    mine = ours.loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)
    other = theirs.loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)
    for (score, greedy), (expected, expected_greedy) in zip(mine, other, strict=True):
        assert score == pytest.approx(expected, abs=1e-3)
        assert greedy == expected_greedy


def test_what_greedy_decoding_gives_is_called_greedy(ours):
    context = "the lazy"
    (text,) = ours.generate_until(instances("generate_until", [(context, {"max_gen_toks": 3})]), disable_tqdm=True)
    tokens = ours.tok_encode(context)
    (output,) = ours._run([tokens], [_sampling({}, [], 3)], quiet=True)
    ((_, greedy), (_, other)) = ours._loglikelihood_tokens(
        [(None, tokens, output.outputs[0].token_ids), (None, tokens, [9, 9, 9])], disable_tqdm=True
    )
    assert greedy and not other
    assert text == output.outputs[0].text


def test_texts_of_any_length_are_scored_in_the_windows_of_the_hf_model(ours, theirs):
    texts = [("the fox",), (WORDS * 3,), (WORDS * 40,)]
    mine = ours.loglikelihood_rolling(instances("loglikelihood_rolling", texts), disable_tqdm=True)
    other = theirs.loglikelihood_rolling(instances("loglikelihood_rolling", texts), disable_tqdm=True)
    assert mine == pytest.approx(other, rel=1e-5)


def test_generation_is_that_of_the_hf_model(ours, theirs):
    requests = [
        ("the quick brown", {"max_gen_toks": 12}),
        ("jumps", {"until": ["o"], "max_gen_toks": 12}),
        (WORDS * 12, {"until": ["x", "."], "max_gen_toks": 8}),
    ]
    mine = ours.generate_until(instances("generate_until", requests), disable_tqdm=True)
    other = theirs.generate_until(instances("generate_until", requests), disable_tqdm=True)
    assert mine == other


def test_a_task_has_the_results_of_the_hf_model(ours, theirs, task):
    manager = TaskManager(include_path=str(task), include_defaults=False)
    results = [
        lm_eval.simple_evaluate(model, tasks=["tiny_choice"], task_manager=manager, bootstrap_iters=0)["results"]
        for model in (ours, theirs)
    ]
    assert results[0] == results[1]


def test_options_that_the_engine_does_not_have_are_refused_and_not_ignored():
    with pytest.raises(EvaluationError, match="num_beams"):
        _sampling({"num_beams": 4}, [], 8)


def test_sampling_is_greedy_unless_the_task_samples():
    assert _sampling({"temperature": 0.7}, [], 8).temperature == 0
    assert _sampling({"temperature": 0.7, "do_sample": True}, [], 8).temperature == 0.7


def test_a_generation_longer_than_the_context_is_refused_with_the_remedy(ours):
    with pytest.raises(EvaluationError, match="max_gen_toks"):
        ours.generate_until(instances("generate_until", [("a", {"max_gen_toks": 100})]), disable_tqdm=True)
