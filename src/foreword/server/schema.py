"""JSON schemas in few words, for the OpenAPI page."""

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]

NULL: Schema = {"type": "null"}
STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
BOOLEAN: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def list_of(items: Schema, **limits: int) -> Schema:
    return {"type": "array", "items": items, **limits}


def any_of(*schemas: Schema, **words: Any) -> Schema:
    return {"anyOf": [*schemas], **words}


def answered(optional: Mapping[str, Schema] | None = None, **properties: Schema) -> Schema:
    """An answer's object: what is not `optional` is there, be it null."""
    required = sorted(properties)
    return {
        "type": "object",
        "properties": {**properties, **(optional or {})},
        **({"required": required} if required else {}),
    }


def body(required: Mapping[str, Schema], **optional: Schema) -> Schema:
    """An object that is sent: what is optional may be null, and so may anything else."""
    return {
        "type": "object",
        "properties": {**required, **{name: or_null(sent) for name, sent in optional.items()}},
        "required": [*required],
        "additionalProperties": NULL,
    }


def or_null(schema: Schema) -> Schema:
    kind = schema.get("type")
    if kind == "null":
        return schema
    if "enum" in schema:
        return {**schema, "enum": [*schema["enum"], None]}
    if isinstance(kind, str):
        return {**schema, "type": [kind, "null"]}
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], NULL]}
    return any_of(schema, NULL) if schema.keys() - {"description"} else schema


def neutral_only(fields: Mapping[str, tuple[Any, ...]]) -> dict[str, Schema]:
    words = "Not supported; these values ask for nothing."
    return {name: {"enum": [*values], "description": words} for name, values in fields.items()}


def limited(default: float | None, low: float, high: float, **words: str) -> Schema:
    shown = {} if default is None else {"default": default}
    return {"minimum": low, "maximum": high, **shown, **words}


def flag(about: str, default: bool = False) -> Schema:
    return {**BOOLEAN, "default": default, "description": about}
