"""Settings from a TOML file and from the environment, by the names of the flags.

`max-model-len = 4096` in the file and FOREWORD_MAX_MODEL_LEN=4096 mean `--max-model-len 4096`.
"""

import argparse
import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from foreword.cli.failure import Failure

PREFIX = "FOREWORD_"
OTHERS = ("FOREWORD_CACHE_DIR",)  # variables that are no flag of `serve`


def configured(parser: argparse.ArgumentParser, words: list[str]) -> list[str]:
    """`words` with what file and environment say put before them, so that flags win over the
    environment and that over the file. The parser must have --config. Raises Failure that names the
    source for what is unknown or wrong."""
    settings = {
        option.removeprefix("--"): action
        for option, action in parser._option_string_actions.items()
        if option.startswith("--") and option != "--help"
    }
    variables = _of_environment(settings, os.environ)
    chosen, _ = _only_config().parse_known_args([*variables, *words])
    file = _of_file(settings, Path(chosen.config)) if chosen.config else []
    for source, found in ((f"{chosen.config}", file), ("the environment", variables)):
        try:
            parser.parse_args(found)
        except Failure as error:
            raise Failure(f"{source}: {error}", "usage") from error
    return [*file, *variables, *words]


def _only_config() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    return parser


def _of_environment(
    settings: Mapping[str, argparse.Action], environment: Mapping[str, str]
) -> list[str]:
    words: list[str] = []
    by_variable = {PREFIX + name.upper().replace("-", "_"): name for name in settings}
    for variable, value in sorted(environment.items()):
        if not variable.startswith(PREFIX) or variable in OTHERS:
            continue
        if variable not in by_variable:
            raise _unknown(f"{variable} is no setting", variable, [*by_variable, *OTHERS])
        name = by_variable[variable]
        if settings[name].nargs == 0:  # a switch
            if value.lower() not in ("0", "1", "false", "true"):
                raise Failure(f"{variable} is {value!r}; it may be true or false", "usage")
            words += [f"--{name}"] * (value.lower() in ("1", "true"))
        else:
            words.append(f"--{name}={value}")
    return words


def _of_file(settings: Mapping[str, argparse.Action], path: Path) -> list[str]:
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise Failure(f"{path} cannot be read: {reason}", "usage") from error
    words: list[str] = []
    for name, value in table.items():
        if name not in settings or name == "config":
            raise _unknown(f"{path}: {name} is no setting", name, settings)
        switch = settings[name].nargs == 0
        if switch != isinstance(value, bool) or not isinstance(value, str | int | float | list):
            wanted = "true or false" if switch else "text, a number or a list of texts"
            raise Failure(f"{path}: {name} is {value!r}; it must be {wanted}", "usage")
        words += [f"--{name}={_text(value)}"] if not switch else [f"--{name}"] if value else []
    return words


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _unknown(message: str, name: str, known: Iterable[str]) -> Failure:
    near = difflib.get_close_matches(name, list(known), n=1)
    return Failure(f"{message}; did you mean {near[0]}?" if near else message, "usage")
