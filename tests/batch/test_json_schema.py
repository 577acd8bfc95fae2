"""Schemas are walked at random: every text that the grammar lets through must be valid under the schema as given."""

import json
import random

import jsonschema
import pytest
import torch
import xgrammar

from hpcgen.batch.grammar import check
from hpcgen.batch.json_schema import UnsupportedSchema, enforceable
from hpcgen.sequence import Grammar

TOKENS = [*map(chr, range(32, 127)), "</s>"]
STOP = len(TOKENS) - 1
A = {"type": "object", "properties": {"kind": {"const": "a"}, "n": {"type": "integer"}}, "required": ["kind"]}
B = {"type": "object", "properties": {"kind": {"const": "b"}, "s": {"type": "boolean"}}, "required": ["kind"]}
ENFORCED = [
    {"type": "object"},
    {"type": "array", "minItems": 1, "maxItems": 3},
    {"type": "object", "required": ["c", "d"]},
    {"type": "object", "required": ["c"], "additionalProperties": {"type": "integer"}},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a", "b"]},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "unevaluatedProperties": False},
    {"type": "object", "patternProperties": {"^a": {"type": "boolean"}}},
    {"type": "object", "propertyNames": {"pattern": "^[ab]+$"}},
    {"type": "object", "minProperties": 1, "maxProperties": 2},
    {"minimum": 3, "maximum": 12},
    {"minLength": 2, "maxLength": 3},
    {"required": ["a"]},
    {"minItems": 2, "maxItems": 2},
    {"type": ["integer", "null"], "maximum": 5},
    {"type": "integer", "multipleOf": 3, "minimum": 0, "maximum": 30},
    {"type": "number", "exclusiveMinimum": 0.5, "maximum": 2},
    {"type": "string", "pattern": "^a[bc]{1,3}$"},
    {"type": "string", "format": "uuid"},
    {"enum": [1, "a", None, {"x": [1]}]},
    {"type": "string", "enum": ["a", "b"]},
    {"anyOf": [A, B], "title": "either"},
    {"oneOf": [A, B]},
    {"$defs": {"A": A, "B": B}, "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]},
    {"oneOf": [{"type": "string"}, {"type": "integer"}]},
    {"allOf": [A]},
    {"$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1}}, "$ref": "#/$defs/tree"},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}], "items": False},
]
REFUSED = {
    "not": {"not": {"type": "string"}},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "if": {"if": {"required": ["a"]}, "then": {"required": ["b"]}},
    "contains": {"type": "array", "contains": {"type": "integer"}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "minLength": {"type": "string", "pattern": "^a", "minLength": 3},
    "allOf": {"allOf": [A, B]},
    "required": {"anyOf": [A, B], "required": ["n"]},
    "minimum": {"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n", "minimum": 3},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "tells the schemas apart": {"oneOf": [A, {**A, "properties": {"kind": {"enum": ["a", "c"]}}}]},
    "is not of type": {"type": "string", "enum": ["a", 3]},
    "needs a 'type'": {"minimum": 3, "minLength": 2},
    "ref": {"$ref": "#anchor", "$defs": {"x": {"$anchor": "anchor"}}},
    "patternProperties": {"type": "object", "patternProperties": {"^a": {}}, "additionalProperties": True},
}


@pytest.fixture(scope="module")
def compiler():
    return xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(TOKENS, stop_token_ids=[STOP]), max_threads=1)


def walk(compiled, rng, most=400):
    """A random text of the grammar, or None where it does not come to an end."""
    matcher = xgrammar.GrammarMatcher(compiled)
    bitmask = xgrammar.allocate_token_bitmask(1, len(TOKENS))
    text = ""
    for _ in range(most):
        matcher.fill_next_token_bitmask(bitmask)
        bits = (bitmask[0][:, None] >> torch.arange(32, dtype=torch.int32)) & 1
        allowed = bits.flatten()[: len(TOKENS)].nonzero()[:, 0].tolist()
        closing = [token for token in allowed if token == STOP or TOKENS[token] in '"}],:']
        token = rng.choice(closing if closing and rng.random() < 0.6 else allowed)
        assert matcher.accept_token(token)
        if token == STOP:
            return text
        text += TOKENS[token]
    return None


@pytest.mark.parametrize("schema", ENFORCED, ids=json.dumps)
def test_every_text_of_the_grammar_is_valid_under_the_schema_as_given(compiler, schema):
    compiled = compiler.compile_json_schema(check(Grammar("json_schema", json.dumps(schema))).text)
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    rng = random.Random(json.dumps(schema))
    texts = [text for _ in range(40) if (text := walk(compiled, rng)) is not None]
    assert texts
    for text in texts:
        validator.validate(json.loads(text))


@pytest.mark.parametrize(("named", "schema"), REFUSED.items(), ids=REFUSED)
def test_what_would_not_be_enforced_is_refused_by_name(named, schema):
    with pytest.raises(UnsupportedSchema, match=named):
        enforceable(schema)


def test_a_refusal_tells_the_place():
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"not": {}}}}}
    with pytest.raises(UnsupportedSchema, match=r"schema\.properties\.a\.items: 'not'"):
        enforceable(schema)


def test_a_schema_that_is_enforced_as_it_stands_stays_as_it_is():
    assert enforceable(A) == A
