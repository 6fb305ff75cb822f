"""House rules that no stock tool checks, each with its reason."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "foreword"
SOURCES = sorted(SRC.rglob("*.py"))
ALL = SOURCES + [
    path for folder in ("tests", "tools", "bench") for path in sorted((ROOT / folder).rglob("*.py"))
]

CORE_LINES_MAX = 4200  # Apart from policies; a newcomer reads the core in an hour (decision 13).
FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 70  # One screen.
PARAMETERS_MAX = 7

# An allow-list: import-linter can only forbid what somebody thought of.
CORE_STDLIB = {"array", "bisect", "collections", "dataclasses", "enum", "hashlib", "heapq", "math"}
CORE_STDLIB |= {"abc", "itertools", "struct", "sys", "typing"}
# Import directions between rooms, in full: a layer contract alone would let, say, the server see
# the store. Anything else in src/foreword needs a decision record.
MAY_IMPORT = {
    "cli": {"server", "router", "sim", "prompts", "engine", "plugins", "store", "core"},
    "server": {"core", "prompts"},
    "router": {"core"},
    "sim": {"core", "store"},
    "prompts": {"core"},
    "engine": {"core", "store"},
    "plugins": {"core", "store"},
    "store": {"core"},
    "core": set(),
}
# Words that say nothing about the thing they name.
VAGUE = {"manager", "helper", "util", "utils", "controller", "handler", "base", "data", "info"}
# What engines ask plug-ins for by name: vLLM an offloading specification, SGLang a storage.
FORCED = {"get_manager", "extra_info"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def functions(path: Path) -> Iterator[Function]:
    return (node for node in ast.walk(parse(path)) if isinstance(node, Function))


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, by full name."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module, f"relative import in {path}"
            yield node.module
            if node.module == "foreword":  # from foreword import core
                named = [alias.name for alias in node.names if not alias.name.startswith("_")]
                yield from (f"foreword.{name}" for name in named)


def names(path: Path) -> Iterator[str]:
    """What a file calls itself, its classes, functions, parameters and attributes."""
    yield path.stem
    for node in ast.walk(parse(path)):
        if isinstance(node, Function | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def words(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)}


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_core_fits_in_an_hour() -> None:
    num_lines = sum(len(path.read_text().splitlines()) for path in (SRC / "core").glob("*.py"))
    assert 0 < num_lines <= CORE_LINES_MAX


@pytest.mark.parametrize("path", ALL, ids=label)
def test_file_keeps_the_house_rules(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= FILE_LINES_MAX
    assert ast.get_docstring(parse(path)), "a module says what it is for"
    marker = re.search(r"\b(TO" "DO|FIX" "ME|XX" "X)\\b", text)
    assert not marker, f"{marker and marker[0]}: file an issue instead"
    for function in functions(path):
        assert function.end_lineno is not None
        num_lines = function.end_lineno - function.lineno + 1
        assert num_lines <= FUNCTION_LINES_MAX, f"{function.name} has {num_lines} lines"
        parts = function.args
        parameters = [arg.arg for arg in parts.posonlyargs + parts.args + parts.kwonlyargs]
        num_parameters = len([name for name in parameters if name not in ("self", "cls")])
        assert num_parameters <= PARAMETERS_MAX, f"{function.name} takes {num_parameters}"


@pytest.mark.parametrize("path", SOURCES, ids=label)
def test_names_say_something(path: Path) -> None:
    vague = {name for name in names(path) if words(name) & VAGUE} - FORCED
    assert not vague


@pytest.mark.parametrize("room", sorted(MAY_IMPORT))
def test_room_imports_only_what_the_design_lets_it(room: str) -> None:
    seen = {
        module.split(".")[1]
        for path in (SRC / room).rglob("*.py")
        for module in imports(path)
        if module.startswith("foreword.")
    }
    assert seen - {room} <= MAY_IMPORT[room]


def test_there_is_no_other_room() -> None:
    found = {path.relative_to(SRC).parts[0] for path in SOURCES if path.parent != SRC}
    loose = {path.name for path in SRC.glob("*.py")}
    assert found <= set(MAY_IMPORT)
    assert loose <= {"__init__.py", "__main__.py"}


def test_core_imports_are_on_the_list() -> None:
    seen = {module for path in (SRC / "core").rglob("*.py") for module in imports(path)}
    outside = {name for name in seen if not name.startswith("foreword.core")}
    assert {name.split(".")[0] for name in outside} <= CORE_STDLIB


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("KVCacheManager", {"kv", "cache", "manager"}),
        ("block_data", {"block", "data"}),
        ("num_kv_heads", {"num", "kv", "heads"}),
        ("DatabaseURL", {"database", "url"}),
    ],
)
def test_words_of_a_name(name: str, expected: set[str]) -> None:
    assert words(name) == expected
