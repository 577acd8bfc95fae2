import json

import pytest

from hpcgen.batch.request import ChatBody, CompletionBody, InvalidRequest, custom_id_of, parse_request


def parse(request):
    return parse_request(0, json.dumps(request).encode())


def refusal(request):
    with pytest.raises(InvalidRequest) as caught:
        parse(request)
    return caught.value


def test_a_chat_request_keeps_all_its_fields(chat):
    fields = {
        "max_completion_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": -3,
        "stop": ["a", "b"],
        "stop_token_ids": [3, 4],
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
        "presence_penalty": -1,
        "frequency_penalty": 1.5,
        "repetition_penalty": 1.1,
        "ignore_eos": True,
        "min_tokens": 3,
        "chat_template_kwargs": {"shout": True},
    }
    body = parse(chat(**fields)).body
    assert isinstance(body, ChatBody)
    assert {name: getattr(body, name) for name in fields} == fields


def test_logit_bias_has_token_ids_as_keys(chat):
    assert parse(chat(logit_bias={"12": -100})).body.logit_bias == {12: -100.0}


@pytest.mark.parametrize(
    ("prompt", "meaning"),
    [("text", "text"), ([1, 2], [1, 2]), (["text"], "text"), ([[1, 2]], [1, 2])],
)
def test_a_prompt_is_a_text_or_token_ids_or_a_list_of_one_of_them(completion, prompt, meaning):
    body = parse(completion(prompt=prompt)).body
    assert isinstance(body, CompletionBody)
    assert body.text_or_tokens == meaning


@pytest.mark.parametrize("prompt", [[], ["a", "b"], [[1], [2]], [1, "a"], {"a": 1}, [[["a"]]], [-1], None])
def test_other_prompts_are_refused(completion, prompt):
    assert "prompt" in str(refusal(completion(prompt=prompt)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_completion_tokens", -5),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", -0.5),
        ("min_p", 1.5),
        ("n", 0),
        ("n", 129),
        ("seed", 2**63),
        ("stop", [""]),
        ("stop", 3),
        ("stop_token_ids", [-1]),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"1": 101}),
        ("min_tokens", -1),
        ("top_logprobs", 21),
        ("messages", []),
        ("chat_template_kwargs", []),
    ],
)
def test_a_value_out_of_range_is_refused_by_the_name_of_its_field(chat, field, value):
    error = refusal(chat(**({"logprobs": True} | {field: value})))
    assert field in str(error)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stream", True),
        ("stream_options", {"include_usage": True}),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("response_format", {"type": "grammar"}),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "alloy"}),
        ("functions", []),
        ("function_call", "auto"),
        ("web_search_options", {}),
    ],
)
def test_what_we_do_not_do_is_refused_and_not_ignored(chat, field, value):
    message = str(refusal(chat(**{field: value})))
    assert "support" in message and field.split("_")[0] in message


@pytest.mark.parametrize(("field", "value"), [("echo", True), ("suffix", "x"), ("best_of", 3)])
def test_completion_options_that_we_do_not_do_are_refused(completion, field, value):
    assert f"{field} is not supported" in str(refusal(completion(**{field: value})))


@pytest.mark.parametrize(
    "harmless",
    [
        {"user": "u"},
        {"metadata": {"a": "b"}},
        {"store": True},
        {"service_tier": "auto"},
        {"safety_identifier": "s"},
        {"model": "m"},
        {"stream": False},
        {"tool_choice": "none", "tools": [{"type": "function", "function": {"name": "f"}}]},
        {"response_format": {"type": "text"}},
        {"response_format": {"type": "json_object"}},
        {"modalities": ["text"]},
        {"temperature": None, "max_tokens": None, "stop": None, "logprobs": None, "tools": None},
    ],
)
def test_harmless_fields_and_nulls_are_accepted(chat, harmless):
    parse(chat(**harmless))


def test_an_unknown_field_is_named(chat):
    error = refusal(chat(temprature=1))
    assert str(error) == "body.temprature: unknown field" and error.param == "body.temprature"


def test_a_missing_field_is_named(completion):
    request = completion()
    del request["body"]["prompt"]
    assert str(refusal(request)) == "body.prompt: required, but missing"


def test_a_field_deep_inside_is_named_by_its_path(chat):
    messages = [{"role": "user", "content": "x"}, {"role": "user", "content": "y", "mood": 1}]
    assert refusal(chat(messages=messages)).param == "body.messages[1].mood"
    assert refusal(chat(logit_bias={"x": 1})).param == "body.logit_bias"


def test_an_unknown_field_beside_the_body_is_named(chat):
    assert "bodi" in str(refusal(chat() | {"bodi": {}}))


def test_top_logprobs_without_logprobs_is_refused(chat):
    assert "needs logprobs" in str(refusal(chat(top_logprobs=2)))


@pytest.mark.parametrize(
    ("body", "count"), [({}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 3}, 3)]
)
def test_chat_logprobs_are_a_switch_and_a_number(chat, body, count):
    assert parse(chat(**body)).body.logprob_count == count


@pytest.mark.parametrize(("logprobs", "count"), [(None, None), (0, 0), (4, 4)])
def test_completion_logprobs_are_a_number(completion, logprobs, count):
    assert parse(completion(logprobs=logprobs)).body.logprob_count == count


def test_more_min_tokens_than_max_tokens_are_refused(chat):
    assert "min_tokens 5" in str(refusal(chat(min_tokens=5, max_tokens=4)))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"custom_id": None}, "missing_custom_id"),
        ({"custom_id": ""}, "missing_custom_id"),
        ({"method": "GET"}, "invalid_method"),
        ({"method": None}, "invalid_method"),
        ({"url": "/v1/embeddings"}, "invalid_url"),
        ({"url": None}, "invalid_url"),
        ({"custom_id": 7}, "invalid_request"),
        ({"body": None}, "invalid_request"),
        ({"body": []}, "invalid_request"),
    ],
)
def test_what_is_wrong_around_the_body_has_a_code(chat, change, code):
    assert refusal(chat() | change).code == code


def test_a_missing_body_is_an_error(chat):
    request = chat()
    del request["body"]
    assert refusal(request).code == "missing_body"


@pytest.mark.parametrize(
    ("line", "column"),
    [
        (b"{bad", 2),
        (b'{"custom_id": "a", "body": {"x": tru}}', 34),
        (b'{"custom_id": "a", "body": {"x": 1', 35),
        (b'{"custom_id": "a"} 2', 20),
    ],
)
def test_invalid_json_names_the_column(line, column):
    with pytest.raises(InvalidRequest, match=f"invalid JSON at column {column}:") as caught:
        parse_request(0, line)
    assert caught.value.code == "invalid_json"


def test_half_a_surrogate_pair_is_invalid_json():
    with pytest.raises(InvalidRequest, match="invalid JSON: "):
        parse_request(0, b'{"custom_id": "\\ud800"}')


def test_text_that_is_not_utf8_names_the_byte():
    with pytest.raises(InvalidRequest, match="byte 0xff at column 16") as caught:
        parse_request(0, b'{"custom_id": "\xff"}')
    assert caught.value.code == "invalid_utf8"


def test_deep_nesting_is_an_error_and_no_crash(chat):
    line = json.dumps(chat()).encode()[:-2] + b', "metadata": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}}"
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        parse_request(0, line)


@pytest.mark.parametrize("line", [b"", b"[]", b"{bad", b"\xff", b'{"custom_id": 3}', b'{"custom_id": ""}'])
def test_a_line_without_a_custom_id_has_none(line):
    assert custom_id_of(line) is None


def test_the_custom_id_is_found_in_a_request_that_is_wrong_otherwise():
    assert custom_id_of(b'{"url": 3, "body": [1, {}], "custom_id": "x"}') == "x"
