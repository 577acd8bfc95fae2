"""JSON schemas that the grammar compiler enforces in full, made from those that users write.

The compiler (xgrammar) passes over some keywords in silence. Here they are refused by name, or the schema is narrowed
until it says the same without them, so that what is generated is valid under the schema as it was given. Keywords and
their meaning: JSON Schema, draft 2020-12.
"""

from itertools import combinations
from typing import Any

Schema = dict[str, Any]

_NOT_ENFORCED = (
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "dependentRequired", "dependentSchemas",
    "dependencies", "unevaluatedItems", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
_KEYWORDS_OF_TYPE = {
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "object": (
        "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
        "maxProperties", "unevaluatedProperties",
    ),
}  # fmt: skip
_ANNOTATIONS = {
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "discriminator", "nullable",
    "$schema", "$id", "$comment", "$defs", "definitions",
}  # fmt: skip
_WHOLE = ("$ref", "anyOf", "oneOf", "allOf", "const", "enum")
"""Keywords beside which the compiler reads no other."""
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "null": (type(None),),
    "array": (list,), "object": (dict,),
}  # fmt: skip


class UnsupportedSchema(ValueError):
    """A schema that would not be enforced in full; the message says where and why."""


def enforceable(schema: Any) -> Any:
    """A schema all of whose instances are instances of `schema`, in keywords that are enforced.

    Objects are closed where they name properties and do not say that more are allowed.

    Raises:
        UnsupportedSchema: a keyword, or a combination of keywords, is not enforced.
    """
    return _Narrowing(schema).schema(schema, "schema")


class _Narrowing:
    def __init__(self, root: Any) -> None:
        self._root = root

    def schema(self, schema: Any, place: str) -> Any:
        if not isinstance(schema, dict):
            return schema  # true and false are schemas; the compiler refuses what is none
        for keyword in _NOT_ENFORCED:
            if keyword in schema:
                raise UnsupportedSchema(f"{place}: {keyword!r} is not supported")
        result = dict(schema)
        whole = next((keyword for keyword in _WHOLE if keyword in schema), None)
        if whole is not None:
            self._check_whole(schema, whole, place)
        elif "type" not in schema:
            self._add_type(result, place)
        if "pattern" in schema and ("minLength" in schema or "maxLength" in schema):
            raise UnsupportedSchema(f"{place}: 'pattern' beside 'minLength' or 'maxLength' is not supported")
        if schema.get("uniqueItems"):
            raise UnsupportedSchema(f"{place}: 'uniqueItems' is not supported")
        if whole is None:
            self._open_or_close(result, place)
        return self._below(result, place)

    def _check_whole(self, schema: Schema, whole: str, place: str) -> None:
        allowed = _ANNOTATIONS | {whole}
        if whole in ("const", "enum"):
            allowed |= {"type"}
            values = schema["enum"] if whole == "enum" else [schema["const"]]
            types = _types(schema)
            for value in values if isinstance(values, list) and types else []:
                if not _is_of(value, types):
                    raise UnsupportedSchema(
                        f"{place}: the value {value!r} of {whole!r} is not of type {schema['type']!r}"
                    )
        beside = sorted(schema.keys() - allowed)
        if beside:
            raise UnsupportedSchema(f"{place}: {beside[0]!r} beside {whole!r} is not supported")
        if whole == "allOf" and (not isinstance(schema["allOf"], list) or len(schema["allOf"]) != 1):
            raise UnsupportedSchema(f"{place}: 'allOf' of several schemas is not supported")
        if whole == "$ref" and schema["$ref"] != "#" and not str(schema["$ref"]).startswith("#/"):
            raise UnsupportedSchema(f"{place}: only a '$ref' to '#' or '#/...' is supported")
        if whole == "oneOf" and isinstance(schema["oneOf"], list):
            for one, other in combinations([self._resolve(branch) for branch in schema["oneOf"]], 2):
                if not _disjoint(one, other):
                    raise UnsupportedSchema(
                        f"{place}: 'oneOf' is supported where a type, or a required property with 'const' or 'enum', "
                        "tells the schemas apart; write 'anyOf' if more than one may match"
                    )

    def _add_type(self, result: Schema, place: str) -> None:
        """Keywords of one type hold for that type alone; the schema becomes one of that type."""
        types = [name for name, keywords in _KEYWORDS_OF_TYPE.items() if any(keyword in result for keyword in keywords)]
        if len(types) > 1:
            raise UnsupportedSchema(f"{place}: a schema with keywords for {' and '.join(types)} needs a 'type'")
        if types:
            result["type"] = types[0]

    def _open_or_close(self, result: Schema, place: str) -> None:
        types = result.get("type")
        types = [types] if isinstance(types, str) else types or []
        if "object" in types and isinstance(result.get("required", []), list):
            properties = result.get("properties", {})
            unnamed = [name for name in result.get("required", []) if name not in properties]
            if unnamed and "patternProperties" in result:
                raise UnsupportedSchema(
                    f"{place}: the required property {unnamed[0]!r} must be among 'properties' beside patternProperties"
                )
            if unnamed:
                extra = result.get("additionalProperties", True)
                result["properties"] = {**properties, **dict.fromkeys(unnamed, extra)}
            if result.pop("unevaluatedProperties", False) not in (False, True):
                raise UnsupportedSchema(f"{place}: a schema at 'unevaluatedProperties' is not supported")
            constrained = result.keys() & {"properties", "patternProperties", "propertyNames"}
            if not constrained:
                result.setdefault("additionalProperties", True)
            if "patternProperties" in result and result.get("additionalProperties", False) is not False:
                raise UnsupportedSchema(f"{place}: 'patternProperties' needs 'additionalProperties': false")
        if "array" in types and "items" not in result and "prefixItems" not in result:
            result["items"] = True

    def _below(self, result: Schema, place: str) -> Schema:
        for keyword in ("properties", "patternProperties", "$defs", "definitions"):
            if isinstance(result.get(keyword), dict):
                result[keyword] = {
                    name: self.schema(value, f"{place}.{keyword}.{name}") for name, value in result[keyword].items()
                }
        for keyword in ("items", "additionalProperties"):
            if keyword in result:
                result[keyword] = self.schema(result[keyword], f"{place}.{keyword}")
        for keyword in ("anyOf", "oneOf", "allOf", "prefixItems"):
            if isinstance(result.get(keyword), list):
                result[keyword] = [
                    self.schema(value, f"{place}.{keyword}[{index}]") for index, value in enumerate(result[keyword])
                ]
        return result

    def _resolve(self, schema: Any) -> Any:
        """The schema that a chain of local references leads to; {} where it leads nowhere."""
        for _ in range(100):
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            target = self._root
            for key in str(schema["$ref"]).split("/")[1:]:
                target = target.get(key.replace("~1", "/").replace("~0", "~"), {}) if isinstance(target, dict) else {}
            schema = target
        return {}


def _is_of(value: Any, types: set[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in types
    return any(isinstance(value, _PYTHON_TYPES.get(name, ())) for name in types)


def _disjoint(one: Any, other: Any) -> bool:
    """Whether it shows that no value can be an instance of both."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    mine, theirs = _types(one), _types(other)
    if mine and theirs and not mine & theirs:
        return True
    if mine == theirs == {"object"}:
        shared = set(one.get("required", [])) & set(other.get("required", []))
        properties = one.get("properties", {}), other.get("properties", {})
        return any(
            _disjoint_values(_values(properties[0].get(name)), _values(properties[1].get(name))) for name in shared
        )
    return _disjoint_values(_values(one), _values(other))


def _types(schema: Schema) -> set[str]:
    types = schema.get("type", [])
    found = {types} if isinstance(types, str) else set(types)
    return found | {"integer"} if "number" in found else found


def _values(schema: Any) -> list[Any] | None:
    if not isinstance(schema, dict):
        return None
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _disjoint_values(mine: list[Any] | None, theirs: list[Any] | None) -> bool:
    return mine is not None and theirs is not None and not any(value in theirs for value in mine)
