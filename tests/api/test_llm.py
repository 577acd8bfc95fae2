import gc
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from hpcgen.api import LLM, PromptError, SamplingParams
from hpcgen.api.llm import LLMError
from hpcgen.errors import HpcgenError

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def greedy(model: Path, prompt: list[int], count: int) -> list[int]:
    reference = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(reference(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_greedy_tokens_are_those_of_transformers(llm: LLM, model: Path) -> None:
    (output,) = llm.generate({"prompt_token_ids": [40, 41, 42]}, GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == [40, 41, 42]
    assert output.outputs[0].token_ids == greedy(model, [40, 41, 42], 8)
    assert output.outputs[0].finish_reason == "length"
    assert output.finished and output.error is None


def test_outputs_are_in_the_order_of_the_prompts_whatever_ends_first(llm: LLM) -> None:
    lengths = [30, 1, 12, 5]
    params = [SamplingParams(max_tokens=length, ignore_eos=True, seed=1) for length in lengths]
    prompts = [f"the quick {word}" for word in ("brown", "fox", "dog", "lazy")]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths


def test_an_iterator_yields_what_ends_first_before_the_rest(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in (60, 2)]
    order = [len(output.outputs[0].token_ids) for output in llm.generate_iter(["the", "dog"], params)]
    assert order == [2, 60]


def test_the_iterator_reads_prompts_only_as_far_as_the_engine_has_room(model: Path, cache: Path) -> None:
    read = 0

    def prompts() -> Iterator[list[int]]:
        nonlocal read
        while True:
            read += 1
            yield [40, 41, 42, 43]

    with LLM(model, host_memory=4 << 20, expert_batch=16, threads=1) as llm:
        outputs = llm.generate_iter(prompts(), GREEDY)
        next(outputs)
        outputs.close()
    assert read < 1000


def test_leaving_an_iterator_early_frees_the_engine(llm: LLM) -> None:
    outputs = llm.generate_iter(["the"] * 20, SamplingParams(max_tokens=100, ignore_eos=True))
    with pytest.raises(LLMError, match="unfinished"):
        next(outputs)
        llm.generate("dog", GREEDY, use_tqdm=False)
    outputs.close()
    assert len(llm.generate("dog", GREEDY, use_tqdm=False)) == 1


def test_samples_of_one_prompt_differ_and_a_seed_makes_them_the_same_again(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=12, ignore_eos=True)
    first, again = (llm.generate("the quick", params, use_tqdm=False)[0] for _ in range(2))
    assert [sample.index for sample in first.outputs] == [0, 1, 2]
    assert len({tuple(sample.token_ids) for sample in first.outputs}) == 3
    assert [sample.token_ids for sample in first.outputs] == [sample.token_ids for sample in again.outputs]


def test_logprobs_have_the_chosen_token_and_the_most_likely_ones_by_rank(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=3, ignore_eos=True)
    sample = llm.generate("the", params, use_tqdm=False)[0].outputs[0]
    assert sample.logprobs is not None and len(sample.logprobs) == 4
    for token, place in zip(sample.token_ids, sample.logprobs, strict=True):
        assert place[token].rank == 1
        assert sorted(entry.rank for entry in place.values() if entry.rank) == [1, 2, 3]
        assert sum(math.exp(entry.logprob) for entry in place.values()) <= 1
    chosen = sum(place[token].logprob for token, place in zip(sample.token_ids, sample.logprobs, strict=True))
    assert sample.cumulative_logprob == pytest.approx(chosen)


def test_prompts_are_scored_from_the_start_that_is_asked_for(llm: LLM) -> None:
    (whole, part) = llm.generate(
        [[5, 6, 7, 8]] * 2,
        [
            SamplingParams(max_tokens=1, prompt_logprobs=1),
            SamplingParams(max_tokens=1, prompt_logprobs=1, prompt_logprobs_start=3),
        ],
    )
    assert whole.prompt_logprobs is not None and part.prompt_logprobs is not None
    assert whole.prompt_logprobs[0] is None and part.prompt_logprobs[:3] == [None] * 3
    assert [token in place for token, place in zip([6, 7, 8], whole.prompt_logprobs[1:], strict=True) if place]
    last, same = whole.prompt_logprobs[3], part.prompt_logprobs[3]
    assert last is not None and same is not None and last[8].logprob == pytest.approx(same[8].logprob, abs=1e-5)


def test_a_text_conforms_to_what_it_was_asked_to_be(llm: LLM) -> None:
    choices = SamplingParams(max_tokens=20, temperature=1.0, n=4, structured_outputs={"choice": ["fox", "dog"]})
    (output,) = llm.generate(["the "], choices)
    assert {sample.finish_reason for sample in output.outputs} == {"stop"}
    assert {sample.text for sample in output.outputs} <= {"fox", "dog"}


def test_a_stop_string_cuts_the_text_and_is_the_stop_reason(llm: LLM) -> None:
    params = SamplingParams(seed=3, max_tokens=30, ignore_eos=True)
    whole = llm.generate("the", params, use_tqdm=False)[0].outputs[0].text
    stop = whole[4:6]
    stopped = llm.generate("the", SamplingParams(seed=3, max_tokens=30, ignore_eos=True, stop=stop), use_tqdm=False)
    sample = stopped[0].outputs[0]
    assert (sample.text, sample.finish_reason, sample.stop_reason) == (whole[: whole.index(stop)], "stop", stop)


def test_a_stop_token_is_the_stop_reason(llm: LLM) -> None:
    tokens = llm.generate("the", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    params = SamplingParams(temperature=0.0, ignore_eos=True, stop_token_ids=[tokens[2]])
    sample = llm.generate("the", params, use_tqdm=False)[0].outputs[0]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", tokens[2])


def test_chat_goes_through_the_template(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "the dog"}]
    (output,) = llm.chat(conversation, GREEDY, use_tqdm=False)
    expected = "<|start|>user\nthe dog<|end|>\n<|start|>assistant\n"
    assert output.prompt_token_ids == llm.get_tokenizer().encode(expected, add_special_tokens=False)
    (loud,) = llm.chat([conversation], GREEDY, use_tqdm=False, chat_template_kwargs={"shout": True})
    assert "LOUD" in llm.get_tokenizer().decode(loud.prompt_token_ids)


def test_a_prompt_that_is_too_long_fails_alone(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    long, short = llm.generate([[40] * 300, [40]], GREEDY, use_tqdm=False)
    assert long.outputs == [] and "300 tokens" in str(long.error)
    assert len(short.outputs[0].token_ids) == 8
    assert "1 of 2 prompts failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        (SamplingParams(temperature=-1.0), "temperature"),
        (SamplingParams(n=0), r"\$.n"),
        (SamplingParams(top_p=2), "top_p"),
    ],
)
def test_wrong_parameters_are_an_error_that_names_the_prompt_and_the_field(
    llm: LLM, params: SamplingParams, reason: str
) -> None:
    with pytest.raises(PromptError, match=f"prompt 1: .*{reason}"):
        llm.generate(["the", "dog"], [GREEDY, params], use_tqdm=False)


def test_as_many_parameters_as_prompts_are_wanted(llm: LLM) -> None:
    with pytest.raises(PromptError, match="2 prompts, but 3"):
        llm.generate(["the", "dog"], [GREEDY] * 3, use_tqdm=False)


def test_what_is_no_prompt_is_refused(llm: LLM) -> None:
    with pytest.raises(PromptError, match="prompt 0: float is no prompt"):
        llm.generate([3.5], GREEDY, use_tqdm=False)  # type: ignore[list-item]
    with pytest.raises(PromptError, match="'multi_modal_data' is not supported"):
        llm.generate({"prompt": "the", "multi_modal_data": {}}, GREEDY, use_tqdm=False)


def test_a_directory_without_a_model_is_one_clear_message(tmp_path: Path) -> None:
    with pytest.raises(HpcgenError, match=str(tmp_path)):
        LLM(tmp_path)


def test_importing_the_package_imports_no_torch() -> None:
    script = "import hpcgen, sys; assert 'torch' not in sys.modules; hpcgen.SamplingParams; assert 'LLM' in dir(hpcgen)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_closed_llm_says_so(model: Path, cache: Path) -> None:
    with LLM(model, host_memory=16 << 20, threads=1) as llm:
        pass
    llm.close()
    with pytest.raises(LLMError, match="is closed"):
        llm.generate("the", GREEDY)


def test_an_llm_that_nobody_has_any_more_gives_its_threads_back(model: Path, cache: Path) -> None:
    llm = LLM(model, host_memory=16 << 20, threads=1)
    closed = []
    llm._closing.callback(closed.append, True)
    del llm
    gc.collect()
    assert closed
