"""Structured output as requests ask for it, and the grammar that they mean.

`response_format` is OpenAI's; `structured_outputs`, and the older `guided_*` fields that say the same, are vLLM's.
"""

import json
import re
import sys
from functools import lru_cache
from typing import Any

import msgspec

from hpcgen.batch.json_schema import UnsupportedSchema, enforceable
from hpcgen.sequence import Grammar

ANY_OBJECT = Grammar("json_schema", '{"type": "object", "additionalProperties": true}')
"""What `json_object` promises."""


class InvalidGrammar(ValueError):
    """A schema, expression or grammar that cannot be enforced."""


class JsonSchema(msgspec.Struct):
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    json_schema: JsonSchema | None = None

    def __post_init__(self) -> None:
        if self.type not in ("text", "json_object", "json_schema"):
            raise ValueError(
                f"response_format {self.type!r} is not supported: it must be text, json_object or json_schema"
            )
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("response_format needs json_schema where its type is 'json_schema', and only there")
        if self.json_schema is not None and self.json_schema.schema is None:
            raise ValueError("response_format.json_schema has no schema")

    @property
    def grammar(self) -> Grammar | None:
        if self.type == "json_object":
            return ANY_OBJECT
        return None if self.json_schema is None else _of_schema(self.json_schema.schema)


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's field of this name: one of its fields says what the text must be."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        given = [name for name in self.__struct_fields__ if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ValueError(f"structured output needs one of {', '.join(self.__struct_fields__)}; there are {given}")
        if self.choice is not None and not all(self.choice):
            raise ValueError("structured output: a choice must not be empty")

    @property
    def meaning(self) -> Grammar:
        if self.json is not None:
            return _of_schema(self.json)
        if self.regex is not None:
            return Grammar("regex", self.regex)
        if self.choice is not None:
            return Grammar("ebnf", "root ::= " + " | ".join(_literal(text) for text in self.choice))
        return ANY_OBJECT if self.grammar is None else Grammar("ebnf", self.grammar)


@lru_cache(maxsize=256)
def check(grammar: Grammar) -> Grammar:
    """The grammar in a form that is enforced in full.

    Raises:
        InvalidGrammar: there is none, with the reason.
    """
    if grammar.kind == "json_schema":
        try:
            grammar = Grammar("json_schema", json.dumps(enforceable(json.loads(grammar.text))))
        except json.JSONDecodeError as error:
            raise InvalidGrammar(f"the schema is not JSON: {error}") from None
        except UnsupportedSchema as error:
            raise InvalidGrammar(str(error)) from None
        except RecursionError:
            raise InvalidGrammar("the schema is nested too deeply") from None
    compiler = _grammar_class()
    parse = {"json_schema": compiler.from_json_schema, "regex": compiler.from_regex, "ebnf": compiler.from_ebnf}
    try:
        parse[grammar.kind](grammar.text)
    except (RuntimeError, ValueError) as error:
        # The message begins with a time of day and a place in the library's source.
        reason = re.sub(r"^\[[^\]]*\] \S+:\d+: (Check failed: \S+ is false: )?", "", str(error).strip())
        raise InvalidGrammar(reason.splitlines()[0] if reason else type(error).__name__) from None
    return grammar


def _of_schema(schema: Any) -> Grammar:
    return Grammar("json_schema", schema if isinstance(schema, str) else json.dumps(schema))


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _grammar_class() -> Any:
    # The tokenization workers keep torch out of their way; xgrammar cannot be imported without it.
    if sys.modules.get("torch", ...) is None:
        del sys.modules["torch"]
    from xgrammar import Grammar as Parsed

    return Parsed
