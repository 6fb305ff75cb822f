"""The fields of a record, each of the kind that it must have: else the record is bad."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from foreword.sim.pieces import Bad

_COUNT_MAX: Final = 2**31
_PROMPT_MAX: Final = 2**24  # more tokens are no request's, and as many ids would fill the memory


def first_of(item: Mapping[str, Any], *names: str) -> Any:
    """The value of the first name that has one; None where none has."""
    return next((item[name] for name in names if item.get(name) is not None), None)


def count(item: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """A whole number from 0. Raises Bad, also where there is none and no default."""
    found = first_of(item, *names)
    if found is None:
        if default is None:
            raise Bad(f"there is no {' or '.join(names)}")
        return default
    if type(found) is not int or found < 0:
        raise Bad(f"{_name(item, names)} is {_shown(found)}, not a whole number from 0")
    if found >= _COUNT_MAX:
        raise Bad(f"{_name(item, names)} is {_shown(found)}, more than anything here counts")
    return found


def prompt_tokens(item: Mapping[str, Any], *names: str) -> int:
    """The length of a prompt. Raises Bad where it is empty."""
    found = count(item, *names)
    if found == 0:
        raise Bad("its prompt is empty")
    if found > _PROMPT_MAX:
        raise Bad(f"its prompt has {found:,} tokens, more than {_PROMPT_MAX:,}")
    return found


def number(item: Mapping[str, Any], *names: str) -> float | None:
    """A finite number. Raises Bad."""
    found = first_of(item, *names)
    if found is None:
        return None
    if type(found) not in (int, float) or not abs(found) < 1e300:
        raise Bad(f"{_name(item, names)} is {_shown(found)}, not a number")
    return float(found)


_UNITS = {"_ms": 1e-3, "_us": 1e-6, "_ns": 1e-9, "_nano": 1e-9, "Nano": 1e-9}
_EPOCHS = ((1e17, 1e-9), (1e14, 1e-6), (1e11, 1e-3))  # from which a number of seconds is none


def moment(item: Mapping[str, Any], *names: str) -> float | None:
    """A time in seconds: a date of ISO 8601 (UTC where it does not say), or a number, also written
    as a string; in seconds, unless its name says another unit or it is as large as the years since
    1970 are in another. Raises Bad."""
    found = first_of(item, *names)
    if found is None or found == "":
        return None
    name = _name(item, names)
    value: float | None = None
    if type(found) in (int, float) and abs(found) < 1e300:
        value = float(found)
    elif isinstance(found, str):
        try:
            value = float(found)
        except ValueError:
            value = _date(found)
    if value is None or not abs(value) < 1e300:
        raise Bad(f"{name} is {_shown(found)}, not a time")
    for ending, unit in _UNITS.items():
        if name.endswith(ending):
            return value * unit
    return value * next((unit for least, unit in _EPOCHS if abs(value) >= least), 1.0)


def _date(text: str) -> float | None:
    try:
        date = datetime.fromisoformat(text.strip())
    except ValueError:
        return None
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()


def text(item: Mapping[str, Any], *names: str) -> str:
    """A name: a string, or a number as one. "" where there is none. Raises Bad."""
    found = first_of(item, *names)
    if found is None:
        return ""
    if type(found) not in (str, int):
        raise Bad(f"{_name(item, names)} is {_shown(found)}, not a string")
    name = str(found)
    if any("\ud800" <= letter <= "\udfff" for letter in name):
        raise Bad(f"{_name(item, names)} has half a character: {_shown(found)}")
    return name


def mapping(item: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """An object; an empty one where there is none. Raises Bad."""
    found = first_of(item, *names)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise Bad(f"{_name(item, names)} is {_shown(found)}, not an object")
    return found


def objects(item: Mapping[str, Any], *names: str) -> list[dict[str, Any]]:
    """A list of objects; an empty one where there is none. Raises Bad."""
    found = first_of(item, *names)
    if found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise Bad(f"{_name(item, names)} is {_shown(found)}, not a list of objects")
    return found


def _name(item: Mapping[str, Any], names: Sequence[str]) -> str:
    return next(name for name in names if item.get(name) is not None)


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 40 else f"{shown[:37]}..."
