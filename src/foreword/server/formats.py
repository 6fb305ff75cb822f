"""`response_format`, and grammars that an answer's text must follow (llguidance's Lark)."""

import json
from typing import Any

from foreword.server.endless import is_endless
from foreword.server.errors import ApiError
from foreword.server.fields import Fields, shown, wrong_type

# One way to write each document: a small model could fill its answer with blanks.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def response_grammar(fields: Fields) -> str:
    """The grammar of `response_format`; empty where any text will do."""
    if "response_format" not in fields:
        return ""
    path = "response_format"
    wanted = Fields(fields.object(path), path)
    kind = wanted.required("type")
    if kind == "text":
        wanted.only(("type",), {})
        return ""
    if kind == "json_object":
        wanted.only(("type",), {})
        return f"start: {json_rule({'type': 'object'})}"
    if kind != "json_schema":
        known = "'text', 'json_object' or 'json_schema'"
        raise ApiError(f"'{path}.type' is {shown(kind)}; it may be {known}.", f"{path}.type")
    wanted.only(("type", "json_schema"), {})
    wanted.required("json_schema")
    named = Fields(wanted.object("json_schema"), f"{path}.json_schema")
    named.only(("name", "description", "schema", "strict"), {})
    named.boolean("strict")  # an answer follows its schema either way
    return f"start: {json_rule(schema_of(named, 'schema'))}"


def schema_of(fields: Fields, name: str) -> dict[str, Any]:
    """A JSON schema, which must be an object, and which documents can follow to their end."""
    schema = fields.required(name)
    if not isinstance(schema, dict):
        raise wrong_type(fields.param(name), "a JSON schema, an object", schema)
    if is_endless(schema):
        param = fields.param(name)
        raise ApiError(
            f"'{param}' has a part that demands itself without end, so no JSON can be of it: let "
            "the part be optional or something else there.",
            param,
        )
    return schema


def json_rule(schema: dict[str, Any]) -> str:
    """What a grammar's rule says for "JSON of this schema"."""
    return f"%json {json.dumps({**schema, 'x-guidance': _LAYOUT})}"
