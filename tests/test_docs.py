"""The documents are true: what they name exists, and what exists is named."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

import reference
from foreword.cli.main import COMMANDS, command_parser

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
SETTINGS_MAX = 25  # More than a person reads before the first run.


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def verbs() -> set[str]:
    text = (ROOT / "Makefile").read_text()
    found = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert found
    return set(found[1].split())


def core_names() -> set[str]:
    """Public classes and type names of the core."""
    names = set()
    for path in (ROOT / "src" / "foreword" / "core").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                names.add(node.targets[0].id)
    return {name for name in names if re.fullmatch(r"[A-Z]\w*[a-z]\w*", name)}


@pytest.mark.parametrize("path", PAGES, ids=label)
def test_links_lead_somewhere(path: Path) -> None:
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text()):
        if not link.startswith(("http:", "https:")):
            assert (path.parent / link).exists(), link


@pytest.mark.parametrize("path", PAGES, ids=label)
def test_make_verbs_exist(path: Path) -> None:
    used = set(re.findall(r"(?:`|^)make ([a-z-]+)", path.read_text(), re.MULTILINE))
    assert used <= verbs()


def test_contributing_names_every_verb() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert {verb for verb in verbs() if f"`make {verb}`" not in text} == set()


@pytest.mark.parametrize("name", sorted(core_names()))
def test_core_word_is_in_the_glossary(name: str) -> None:
    assert f"| `{name}` |" in (DOCS / "glossary.md").read_text()


def test_named_tests_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (DOCS / "architecture.md").read_text())
    assert named
    for file, name in named:
        text = (ROOT / file).read_text()
        assert re.search(rf"^(?:def|class) {name}\b|^{name} = ", text, re.MULTILINE), name


def test_rooms_are_those_of_the_code() -> None:
    text = (DOCS / "architecture.md").read_text()
    table = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    folders = {path.parent.name for path in (ROOT / "src" / "foreword").glob("*/__init__.py")}
    assert table == folders


def test_decisions_are_numbered_without_gaps() -> None:
    records = sorted((DOCS / "decisions").glob("*.md"))
    assert [path.name[:5] for path in records] == [f"{i:04d}-" for i in range(1, len(records) + 1)]
    for number, path in enumerate(records, start=1):
        assert path.read_text().startswith(f"# {number}. ")


@pytest.mark.parametrize(
    ("page", "limit"), [("docs/architecture.md", 300), ("CONTRIBUTING.md", 60)]
)
def test_page_stays_short(page: str, limit: int) -> None:
    assert len((ROOT / page).read_text().splitlines()) <= limit


@pytest.mark.parametrize("name", sorted(reference.PAGES))
def test_reference_is_what_the_program_says(name: str) -> None:
    assert (reference.FOLDER / name).read_text() == reference.PAGES[name](), "make docs"


def test_commands_in_the_pages_exist() -> None:
    known = {f"foreword {command}" for command in COMMANDS} | {"foreword"}
    named = r"`(?:\.venv/bin/)?(foreword(?: [a-z][a-z-]*)*)"
    for path in PAGES:
        for command in re.findall(named, path.read_text()):
            assert command in known, (path.name, command)


def test_settings_are_few() -> None:
    """Options of what serves; those of benches, checks and plans choose an experiment."""
    serving = [
        name
        for name in COMMANDS
        if not name.startswith(("bench ", "verify", "plan", "replay", "trace "))
    ]
    settings = {action.dest for name in serving for action in reference.arguments(name)}
    assert 0 < len(settings) <= SETTINGS_MAX


def test_every_version_is_pinned_once() -> None:
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line[:1] != "#"]
    names = [re.fullmatch(r"([a-z0-9-]+)==[\w.]+", pin) for pin in pins]
    assert all(names)
    assert len({found[1] for found in names if found}) == len(pins)


def test_only_known_files_lie_at_the_top() -> None:
    """A stray result or note does not slip into a commit."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    tops = {name.split("/")[0] for name in listed}
    assert tops <= {
        *(".ci", ".gitignore", "bench", "docs", "src", "tests", "tools", "packaging", "Makefile"),
        *(
            "pyproject.toml",
            "constraints.txt",
            "LICENSE",
            "README.md",
            "CHANGELOG.md",
            "CONTRIBUTING.md",
        ),
    }


@pytest.mark.parametrize("name", ["Dockerfile", "foreword.service"])
def test_packaged_commands_can_be_parsed(name: str) -> None:
    text = (ROOT / "packaging" / name).read_text()
    found = re.search(r"^(?:ENTRYPOINT|ExecStart=).*$", text, re.MULTILINE)
    assert found
    command = found[0].removeprefix("ENTRYPOINT").removeprefix("ExecStart=")
    program, verb, *flags = re.findall(r"[^\s\[\]\",]+", command)
    assert program.endswith("foreword")
    assert command_parser(verb).parse_args(flags)
