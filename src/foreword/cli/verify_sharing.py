"""`foreword verify --sharing`: who has stored blocks in a folder, and why they share or do not."""

import json
from itertools import combinations
from pathlib import Path
from typing import Any

from foreword.cli.failure import Failure
from foreword.core.identity import Identity
from foreword.store.sharers import identities

_SHOWN = 100  # characters of a field's value


def sharing(folder: Path) -> dict[str, Any]:
    """`identities`: by a short name, what distinguishes it; `pairs`: of each two, the fields that
    differ. Engines of one identity share their blocks; of two, none. Raises Failure."""
    try:
        found = identities(folder)
    except OSError as error:
        raise Failure(f"{folder} cannot be read: {error.strerror}", "settings") from error
    names = {identity: identity.root_hash().hex()[:16] for identity in found}
    pairs = [
        {"of": [names[one], names[other]], "differ": _differing(one, other)}
        for one, other in combinations(found, 2)
    ]
    return {
        "folder": str(folder),
        "identities": [{"name": names[identity], **_facts(identity, found)} for identity in found],
        "pairs": pairs,
    }


def print_sharing(result: dict[str, Any]) -> int:
    found = result["identities"]
    print(f"identities of engines that keep blocks in {result['folder']}: {len(found)}")
    for facts in found:
        print(f"\n{facts['name']}")
        for name, value in facts.items():
            if name != "name":
                print(f"  {name:<14} {value}")
    for pair in result["pairs"]:
        print(f"\n{pair['of'][0]} and {pair['of'][1]} share nothing: {', '.join(pair['differ'])}")
    return 0


def _differing(one: Identity, other: Identity) -> list[str]:
    """Fields that differ, and within those that are JSON objects the keys that do."""
    names: list[str] = []
    for field in one.differences(other):
        left, right = _parts(getattr(one, field)), _parts(getattr(other, field))
        keys = [key for key in left | right if left.get(key) != right.get(key)]
        names += [f"{field}.{key}" for key in sorted(keys)] or [field]
    return names


def _parts(value: object) -> dict[str, object]:
    try:
        parts = json.loads(str(value))
    except ValueError:
        return {}
    return parts if isinstance(parts, dict) else {}


def _facts(identity: Identity, others: list[Identity]) -> dict[str, str]:
    """The fields that tell it from others, and those that people know it by."""
    differing = {name for other in others for name in identity.differences(other)}
    names = dict.fromkeys(("weights", "dtype", "layout", "block_size")) | dict.fromkeys(
        sorted(differing)
    )
    facts = {name: str(getattr(identity, name)) for name in names}
    return {
        name: value if len(value) <= _SHOWN else f"{value[:_SHOWN]}…"
        for name, value in facts.items()
    }
