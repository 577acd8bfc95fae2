import json
from array import array

import pytest
from transformers import AutoTokenizer

from hpcgen.batch.request import InvalidRequest, parse_request
from hpcgen.batch.tokenization import RequestTokenizer, TokenizerError, load_tokenizer, sampling_key, sequence_id

CONTEXT = 64


@pytest.fixture(scope="module")
def tokenizer_of(model_directory):
    return RequestTokenizer(model_directory, run_seed=5, max_model_len=CONTEXT)


@pytest.fixture
def sequences(tokenizer_of):
    return lambda request, index=0: tokenizer_of.sequences(parse_request(index, json.dumps(request).encode()))


@pytest.fixture
def refusal(sequences):
    def refuse(request):
        with pytest.raises(InvalidRequest) as caught:
            sequences(request)
        return caught.value

    return refuse


def test_a_chat_prompt_is_what_transformers_makes_of_the_messages(sequences, chat, model_directory):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the fox"}]
    expected = AutoTokenizer.from_pretrained(model_directory).apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert sequences(chat(messages=messages))[0].prompt == array("I", expected)


def test_chat_template_kwargs_reach_the_template(sequences, chat):
    plain, loud = sequences(chat()), sequences(chat(chat_template_kwargs={"shout": True}))
    assert len(loud[0].prompt) > len(plain[0].prompt)


def test_chat_template_kwargs_may_leave_the_generation_prompt_out(sequences, chat):
    plain, cut = sequences(chat()), sequences(chat(chat_template_kwargs={"add_generation_prompt": False}))
    assert len(cut[0].prompt) < len(plain[0].prompt)


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "tools", "truncation"])
def test_chat_template_kwargs_may_not_set_what_is_ours(refusal, chat, name):
    assert name in str(refusal(chat(chat_template_kwargs={name: True})))


def test_developer_messages_are_system_messages_where_the_template_knows_no_developer(sequences, chat):
    as_developer = sequences(chat(messages=[{"role": "developer", "content": "x"}]))
    as_system = sequences(chat(messages=[{"role": "system", "content": "x"}]))
    assert as_developer[0].prompt == as_system[0].prompt


def test_an_error_of_the_template_is_the_requests_error(sequences, tokenizer_of, chat, monkeypatch):
    monkeypatch.setattr(tokenizer_of._tokenizer, "chat_template", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        sequences(chat())
    assert caught.value.code == "chat_template_error"


@pytest.mark.parametrize(
    "field", [{"reasoning_effort": "high"}, {"tools": [{"type": "function", "function": {"name": "f"}}]}]
)
def test_what_the_template_does_not_take_is_refused(refusal, chat, field):
    assert f"takes no {next(iter(field))}" in str(refusal(chat(**field)))


def test_tools_that_may_not_be_called_are_left_out(sequences, chat):
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert sequences(chat(tools=tools, tool_choice="none"))[0].prompt == sequences(chat())[0].prompt


def test_token_ids_are_taken_as_they_are(sequences, completion):
    assert sequences(completion(prompt=[5, 6, 399]))[0].prompt == array("I", [5, 6, 399])


@pytest.mark.parametrize(
    "field", [{"prompt": [400]}, {"stop_token_ids": [400]}, {"logit_bias": {"400": 1}}, {"prompt": [2**32 - 1]}]
)
def test_a_token_outside_the_vocabulary_is_refused(refusal, completion, field):
    message = str(refusal(completion(**field)))
    assert next(iter(field)) in message and "vocabulary of 400" in message


def test_a_prompt_that_fills_the_context_names_both_numbers(refusal, sequences, completion):
    assert sequences(completion(prompt=[7] * (CONTEXT - 1)))[0].sampling.max_tokens == 1
    error = refusal(completion(prompt=[7] * CONTEXT))
    assert error.code == "context_length_exceeded"
    assert "has 64 tokens, the context 64" in str(error)
    assert "has 99 tokens" in str(refusal(completion(prompt=[7] * 99)))


def test_a_prompt_without_tokens_is_refused(refusal, completion):
    assert refusal(completion(prompt="")).code == "empty_prompt"


@pytest.mark.parametrize(("asked", "got"), [(None, CONTEXT - 10), (5, 5), (1000, CONTEXT - 10)])
def test_max_tokens_is_cut_to_what_the_context_leaves(sequences, completion, asked, got):
    assert sequences(completion(prompt=[7] * 10, max_tokens=asked))[0].sampling.max_tokens == got


def test_min_tokens_is_cut_with_max_tokens(sequences, completion):
    sampling = sequences(completion(prompt=[7] * 60, min_tokens=10, max_tokens=20))[0].sampling
    assert (sampling.min_tokens, sampling.max_tokens) == (4, 4)


def test_all_end_of_sequence_tokens_of_the_model_stop_a_sequence(sequences, completion):
    assert sequences(completion())[0].sampling.stop_token_ids == (1, 2)
    assert sequences(completion(stop_token_ids=[9]))[0].sampling.stop_token_ids == (1, 2, 9)


def test_ignore_eos_leaves_only_the_requests_own_stop_tokens(sequences, completion):
    assert sequences(completion(ignore_eos=True, stop_token_ids=[9]))[0].sampling.stop_token_ids == (9,)


def test_a_special_token_as_stop_string_becomes_a_stop_token(sequences, completion):
    sampling = sequences(completion(stop=["<|start|>", "fox"]))[0].sampling
    assert sampling.stop == ("fox",) and 0 in sampling.stop_token_ids


def test_sampling_options_arrive_and_absent_ones_have_the_defaults(sequences, completion):
    given = sequences(completion(temperature=0, top_p=0.5, top_k=-1, logprobs=2, logit_bias={"9": 1, "3": -1}))[0]
    assert (given.sampling.temperature, given.sampling.top_p, given.sampling.top_k) == (0.0, 0.5, 0)
    assert given.sampling.logprobs == 2 and given.sampling.logit_bias == ((3, -1.0), (9, 1.0))
    absent = sequences(completion())[0].sampling
    assert (absent.temperature, absent.top_p, absent.min_p, absent.logprobs) == (1.0, 1.0, 0.0, None)
    assert (absent.presence_penalty, absent.frequency_penalty, absent.repetition_penalty) == (0.0, 0.0, 1.0)


def test_samples_are_in_order_with_ids_that_rise_over_requests(sequences, completion):
    first, second = sequences(completion(n=3), index=0), sequences(completion(n=2), index=1)
    assert [(s.request, s.sample) for s in first + second] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    ids = [s.id for s in first + second]
    assert ids == sorted(set(ids)) == [sequence_id(s.request, s.sample) for s in first + second]


def test_samples_draw_different_numbers(sequences, completion):
    keys = {s.sampling.key for index in range(3) for s in sequences(completion(n=3), index)}
    assert len(keys) == 9 and all(0 <= key < 2**64 for key in keys)


def test_a_request_with_a_seed_draws_the_same_numbers_in_any_run_and_place():
    assert sampling_key(1, 10, 2, request_seed=7) == sampling_key(99, 3, 2, request_seed=7)
    assert sampling_key(1, 10, 2, request_seed=7) != sampling_key(1, 10, 2, request_seed=8)
    assert sampling_key(1, 10, 2, None) != sampling_key(2, 10, 2, None)


def test_keys_are_the_same_in_every_release():
    assert sampling_key(0, 0, 0, None) == 550976741734387927
    assert sampling_key(0, 0, 0, 0) == 2389519222696217693


def test_a_directory_without_a_tokenizer_is_one_clear_error(tmp_path):
    with pytest.raises(TokenizerError, match="cannot load a tokenizer from"):
        load_tokenizer(tmp_path)


def test_a_model_without_a_chat_template_refuses_chats_alone(tokenizer_of, sequences, chat, completion, monkeypatch):
    monkeypatch.setattr(tokenizer_of, "_template", "")
    with pytest.raises(InvalidRequest, match="use /v1/completions"):
        sequences(chat())
    assert sequences(completion())
