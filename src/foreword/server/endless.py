"""JSON schemas that demand themselves without end: no document follows one, and an answer that must
would break off or never stop."""

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]


def is_endless(root: Schema) -> bool:
    """Whether a schema, or a part that an answer may come to, has no finite document. What is not
    understood counts as harmless. Takes time in proportion to the schema."""
    unmet: dict[int, set[int]] = {}  # of each part, the demands that are not known to end
    waiting: dict[int, list[tuple[int, int]]] = defaultdict(list)  # for a part: part and demand
    ending: list[int] = []
    for schema, demands in _parts(root):
        unmet[id(schema)] = set(range(len(demands)))
        if not demands:
            ending.append(id(schema))
        for number, choices in enumerate(demands):
            for choice in choices:
                waiting[id(choice)].append((id(schema), number))
    while ending:
        for whole, number in waiting.pop(ending.pop(), ()):
            if number in unmet[whole]:
                unmet[whole].remove(number)
                if not unmet[whole]:
                    ending.append(whole)
    return any(unmet.values())


def _parts(root: Schema) -> Iterator[tuple[Schema, list[list[Schema]]]]:
    """All that an answer may come to, each once, with what it demands: of each list, one."""
    known, found = {id(root)}, [root]
    while found:
        schema = found.pop()
        demands: list[list[Schema]] = []
        if "enum" not in schema and "const" not in schema:
            demands = [*_whole(root, schema), *([part] for part in _inner(schema))]
        yield schema, demands
        for part in [*(part for choices in demands for part in choices), *_allowed(schema)]:
            if id(part) not in known:
                known.add(id(part))
                found.append(part)


def _whole(root: Schema, schema: Schema) -> Iterator[list[Schema]]:
    """What all of a document must follow besides."""
    target = _resolved(root, schema.get("$ref"))
    if target is not None:
        yield [target]
    for part in _schemas(schema.get("allOf")):
        yield [part]
    for word in ("anyOf", "oneOf"):
        choices = _schemas(schema.get(word))
        if choices and len(choices) == len(schema[word]):
            yield choices


def _inner(schema: Schema) -> list[Schema]:
    """What values must follow that a document cannot do without."""
    if schema.get("type") == "object":
        required, properties = schema.get("required"), schema.get("properties")
        if isinstance(required, list) and isinstance(properties, dict):
            names = [name for name in required if isinstance(name, str)]
            return _schemas([properties.get(name) for name in names])
    if schema.get("type") == "array":
        at_least, first = schema.get("minItems"), schema.get("prefixItems")
        first = first if isinstance(first, list) else []
        if isinstance(at_least, int) and at_least > 0:
            rest = [schema.get("items")] if at_least > len(first) else []
            return _schemas(first[:at_least] + rest)
    return []


def _allowed(schema: Schema) -> Iterator[Schema]:
    """Where a document may go further, though it need not."""
    for word in ("properties", "patternProperties"):
        if isinstance(parts := schema.get(word), dict):
            yield from _schemas([*parts.values()])
    yield from _schemas(schema.get("prefixItems"))
    yield from _schemas([schema.get("items"), schema.get("additionalProperties")])


def _schemas(parts: Any) -> list[Schema]:
    """Those of a list that are schemas with words in them; none where it is no list."""
    return [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []


def _resolved(root: Schema, ref: Any) -> Schema | None:
    """The part that a JSON pointer into the same schema leads to."""
    if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
        return None
    part: Any = root
    for step in ref.split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(part, dict):
            part = part.get(name)
        elif isinstance(part, list) and re.fullmatch("[0-9]{1,6}", name):
            part = part[int(name)] if int(name) < len(part) else None
        else:
            return None
    return part if isinstance(part, dict) else None
