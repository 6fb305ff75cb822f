"""The fields of a JSON body: typed reading, and errors that say what to change."""

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from foreword.server.errors import ApiError

MAX_DEPTH = 500  # of lists and objects: what writes them again, a template say, needs stack too


def shown(value: object, num_characters: int = 60) -> str:
    """A value as JSON on one line, shortened."""
    try:
        text = json.dumps(value)
    except RecursionError:
        text = "something deeply nested"
    return text if len(text) <= num_characters else text[: num_characters - 3] + "..."


def wrong_type(param: str, expected: str, value: object) -> ApiError:
    return ApiError(f"'{param}' must be {expected}, not {shown(value)}.", param, "invalid_type")


def parse_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in a body. All text in it can be written as UTF-8 and no number is NaN; one
    too large for a float is infinite, out of every range."""
    try:
        body = json.loads(raw.decode(), parse_constant=_refuse_constant)
        if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and _is_deep(body):
            raise RecursionError
        if re.search(rb"\\u[dD]", raw):
            json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        lone = f"\\u{ord(error.object[error.start]):04x}"
        raise ApiError(
            f"A string in the body holds half of a surrogate pair ({lone}), which is not text: "
            "send both halves or neither.",
            code="invalid_json",
        ) from error
    except UnicodeDecodeError as error:
        raise ApiError(
            f"The body is not UTF-8 (byte {error.start}).", code="invalid_json"
        ) from error
    except RecursionError as error:
        raise ApiError("The body is nested too deeply.", code="invalid_json") from error
    except ValueError as error:
        raise ApiError(f"The body is not JSON: {error}.", code="invalid_json") from error
    if not isinstance(body, dict):
        raise ApiError("The body must be a JSON object.", code="invalid_type")
    return body


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        lists = [item for item in level if isinstance(item, list)]
        objects = [list(item.values()) for item in level if isinstance(item, dict)]
        level = [inner for items in lists + objects for inner in items]
    return bool(level)


def json_in(text: str) -> Any:
    """What a text says in JSON, if all of it can be written again; None where it cannot."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return None
    return None if _is_deep(value) else value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


class Fields:
    """One JSON object. A field that is null counts as absent, as at OpenAI. `path` is how error
    messages call the object, empty for the body."""

    def __init__(self, body: Mapping[str, Any], path: str = "") -> None:
        self._body = {name: value for name, value in body.items() if value is not None}
        self._path = path

    def param(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def __contains__(self, name: str) -> bool:
        return name in self._body

    def get(self, name: str) -> Any:
        return self._body.get(name)

    def required(self, name: str) -> Any:
        if name not in self._body:
            param = self.param(name)
            raise ApiError(f"'{param}' is missing: send it.", param, "missing_required_parameter")
        return self._body[name]

    def only(self, known: Iterable[str], unsupported: Mapping[str, tuple[Any, ...]]) -> None:
        """Refuse fields outside `known`. `unsupported` fields may hold one of the listed values,
        which ask for nothing."""
        names = [*known, *unsupported]
        for name, value in self._body.items():
            param = self.param(name)
            if name in unsupported:
                if not any(_same(value, neutral) for neutral in unsupported[name]):
                    raise ApiError(
                        f"'{param}' is not supported: leave it out.", param, "unsupported_parameter"
                    )
            elif name not in names:
                near = difflib.get_close_matches(name[:64], names, n=1)
                advice = f"did you mean '{near[0]}'?" if near else "leave it out."
                raise ApiError(
                    f"Unknown field {shown(param)}: {advice}", param[:64], "unknown_parameter"
                )

    def integer(self, name: str, default: int | None, low: int, high: int) -> int | None:
        value = self._body.get(name)
        if value is None:
            return default
        if type(value) is not int:
            raise wrong_type(self.param(name), "an integer", value)
        self._within(name, value, low, high)
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self._body.get(name)
        if value is None:
            return default
        if type(value) not in (int, float):
            raise wrong_type(self.param(name), "a number", value)
        self._within(name, value, low, high)
        return float(value)

    def _within(self, name: str, value: float, low: float, high: float) -> None:
        if not low <= value <= high:
            param = self.param(name)
            raise ApiError(f"'{param}' is {shown(value)}; it must lie from {low} to {high}.", param)

    def boolean(self, name: str) -> bool:
        value = self._body.get(name, False)
        if not isinstance(value, bool):
            raise wrong_type(self.param(name), "true or false", value)
        return value

    def text(self, name: str, default: str, length_max: int) -> str:
        """A string of 1 to `length_max` characters."""
        value = self._body.get(name, default)
        if not isinstance(value, str):
            raise wrong_type(self.param(name), "a string", value)
        if name in self._body and not 0 < len(value) <= length_max:
            param = self.param(name)
            raise ApiError(
                f"'{param}' has {len(value)} characters; 1 to {length_max} are allowed.", param
            )
        return value

    def object(self, name: str) -> dict[str, Any]:
        value = self._body.get(name, {})
        if not isinstance(value, dict):
            raise wrong_type(self.param(name), "an object", value)
        return value


def _same(value: Any, neutral: Any) -> bool:
    """Equal as JSON: false is not 0."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)
