import json
import subprocess
import sys

import pytest

from hpcgen.batch.grammar import ANY_OBJECT, InvalidGrammar, check
from hpcgen.batch.request import InvalidRequest, parse_request
from hpcgen.batch.tokenization import RequestTokenizer
from hpcgen.sequence import Grammar

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture(scope="module")
def grammar_of(model_directory, chat):
    tokenizer = RequestTokenizer(model_directory, run_seed=0, max_model_len=64)

    def make(**body):
        request = parse_request(0, json.dumps(chat(**body)).encode())
        return tokenizer.sequences(request)[0].sampling.grammar

    return make


def test_a_request_without_a_format_has_no_grammar(grammar_of):
    assert grammar_of() is None
    assert grammar_of(response_format={"type": "text"}) is None


def test_openai_and_vllm_ways_to_ask_for_a_schema_mean_the_same(grammar_of):
    grammars = {
        grammar_of(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}),
        grammar_of(structured_outputs={"json": SCHEMA}),
        grammar_of(structured_outputs={"json": json.dumps(SCHEMA)}),
        grammar_of(guided_json=SCHEMA),
    }
    assert grammars == {Grammar("json_schema", json.dumps(SCHEMA))}


def test_json_object_means_any_object(grammar_of):
    assert grammar_of(response_format={"type": "json_object"}) == ANY_OBJECT
    assert grammar_of(structured_outputs={"json_object": True}) == ANY_OBJECT


def test_choices_become_a_grammar_of_literals(grammar_of):
    grammar = grammar_of(guided_choice=["yes", 'n"o', "é\n"])
    assert grammar == Grammar("ebnf", 'root ::= "yes" | "n\\"o" | "é\\n"')


def test_a_completion_may_have_a_grammar_too(model_directory, completion):
    tokenizer = RequestTokenizer(model_directory, run_seed=0, max_model_len=64)
    request = parse_request(0, json.dumps(completion(guided_regex="a+")).encode())
    assert tokenizer.sequences(request)[0].sampling.grammar == Grammar("regex", "a+")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"guided_regex": "(a"}, "parenthesis"),
        ({"guided_regex": r"(?=a)b"}, "Lookahead"),
        ({"guided_grammar": "root ::= missing"}, "not defined"),
        ({"guided_json": "{"}, "not JSON"),
        ({"guided_json": {"type": "objec"}}, "objec"),
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": False}}}, "cannot accept any value"),
    ],
)
def test_what_cannot_be_enforced_is_an_error_of_its_request_with_the_reason(grammar_of, body, reason):
    with pytest.raises(InvalidRequest, match=reason) as caught:
        grammar_of(**body)
    assert caught.value.code == "invalid_grammar"
    assert "/project/" not in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        {"guided_regex": "a", "response_format": {"type": "json_object"}},
        {"guided_regex": "a", "guided_choice": ["b"]},
        {"structured_outputs": {"regex": "a", "json_object": True}},
        {"structured_outputs": {}},
        {"guided_choice": []},
        {"guided_choice": [""]},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        {"response_format": {"type": "json_object", "json_schema": {"schema": {}}}},
        {"guided_regex": "a", "min_tokens": 2},
        {"guided_regex": "a", "ignore_eos": True},
        {"guided_regex": "a", "stop_token_ids": [5]},
        {"structured_outputs": {"structural_tag": "x"}},
    ],
)
def test_contradictions_are_refused(grammar_of, body):
    with pytest.raises(InvalidRequest):
        grammar_of(**body)


def test_a_schema_nested_without_end_is_refused():
    with pytest.raises(InvalidGrammar):
        check(Grammar("json_schema", '{"items":' * 100_000 + "{}" + "}" * 100_000))


def test_grammars_are_checked_where_torch_was_hidden_before():
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from hpcgen.batch.grammar import check\n"
        "from hpcgen.sequence import Grammar\n"
        "assert 'xgrammar' not in sys.modules\n"
        "print(check(Grammar('regex', 'a+')).text)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "a+"
