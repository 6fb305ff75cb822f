"""Schemas that no document follows, and recursive ones that end."""

import time
from typing import Any

import pytest

from foreword.server.endless import is_endless

SELF = {"$ref": "#"}
LOOP = {"$ref": "#/$defs/a"}
DEFS = {"$defs": {"a": LOOP}}
ENDLESS: dict[str, dict[str, Any]] = {
    "itself": SELF,
    "a definition": {**DEFS, **LOOP},
    "two": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": LOOP}, **LOOP},
    "all choices": {"anyOf": [SELF, {"oneOf": [SELF]}]},
    "one of all": {"allOf": [{"type": "string"}, SELF]},
    "a required property": {"type": "object", "properties": {"a": SELF}, "required": ["a"]},
    "an optional property": {"type": "object", "properties": {"a": LOOP}, **DEFS},
    "items": {"type": "array", "items": SELF, "minItems": 1},
    "a first item": {"type": "array", "prefixItems": [SELF], "minItems": 1},
    "items that need not be": {"type": "array", "items": LOOP, **DEFS},
    "any property": {"type": "object", "additionalProperties": LOOP, **DEFS},
    "a choice among others": {"anyOf": [{"type": "null"}, LOOP], **DEFS},
    "a place in a list": {"anyOf": [{"$ref": "#/anyOf/0"}]},
    "an escaped name": {"$defs": {"a/b c": {"$ref": "#/$defs/a~1b%20c"}}, "$ref": "#/$defs/a~1b c"},
}
TREE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "kids": {"type": "array", "items": SELF}},
    "required": ["v", "kids"],
}
ENDING: dict[str, dict[str, Any]] = {
    "a tree": TREE,
    "a list": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"next": SELF}}]},
    "a chain that may be null": {
        "type": "object",
        "properties": {"next": {"anyOf": [{"type": "null"}, SELF]}},
        "required": ["next"],
    },
    "an object or null": {"type": ["object", "null"], "properties": {"a": SELF}, "required": ["a"]},
    "a constant": {"$ref": "#", "const": 1},
    "what is never come to": {"type": "string", **DEFS},
    "no such place": {"$ref": "#/$defs/z"},
    "no such item": {"anyOf": [{"$ref": "#/anyOf/7"}]},
    "another document": {"$ref": "other.json"},
    "required and unknown": {"type": "object", "required": ["a", 1, None]},
    "nonsense": {
        "anyOf": 1,
        "allOf": {},
        "properties": [1],
        "required": 3,
        "items": "x",
        "$ref": 1,
    },
    "boolean parts": {"anyOf": [True, SELF], "items": False},
    "fewer items": {"type": "array", "prefixItems": [True], "items": SELF, "minItems": 1},
    "a property called $ref": {"type": "object", "properties": {"$ref": {"type": "string"}}},
}


@pytest.mark.parametrize("schema", ENDLESS.values(), ids=list(ENDLESS))
def test_endless(schema: dict[str, Any]) -> None:
    assert is_endless(schema)
    assert is_endless(
        {
            "type": "array",
            "items": {"allOf": [{"$ref": "#/$defs/x"}]},
            "$defs": {"x": {"type": "array", "minItems": 2, "items": {"$ref": "#/$defs/x"}}},
        }
    )


@pytest.mark.parametrize("schema", ENDING.values(), ids=list(ENDING))
def test_ending(schema: dict[str, Any]) -> None:
    assert not is_endless(schema)


def test_a_long_chain_takes_no_long_time() -> None:
    links = {f"{i}": {"$ref": f"#/$defs/{i + 1}"} for i in range(50_000)}
    begin_s = time.process_time()
    assert not is_endless({"$defs": {**links, "50000": {"type": "null"}}, "$ref": "#/$defs/0"})
    assert is_endless({"$defs": {**links, "50000": SELF}, "$ref": "#/$defs/0"})
    assert time.process_time() - begin_s < 5
