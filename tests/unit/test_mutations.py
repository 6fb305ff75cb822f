"""The mutation tool itself: a tool that makes no mutants would report a perfect score."""

import pytest

from mutations import mutants_of


def after(source: str) -> set[str]:
    return {mutant.mutation.split("  =>  ")[1] for mutant in mutants_of("x.py", source)}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a < b", {"a <= b", "a >= b", "pass"}),
        ("a = b and c", {"a = b or c", "pass"}),
        ("a = not b", {"a = b", "pass"}),
        ("a += 1", {"a -= 1", "a += 2", "a += 0", "pass"}),
        ("a = True", {"a = False", "pass"}),
        ("a = b * c", {"a = b // c", "pass"}),
        ("a = min(b, c)", {"a = max(b, c)", "pass"}),
        ("a = b[c:]", {"a = b[:]", "a = b[c + 1:]", "a = b[c - 1:]", "pass"}),
        ("a(*range(b))", {"a(*range(b + 1))", "a(*range(b - 1))", "pass"}),
        ("a(*reversed(b))", {"a(*b)", "pass"}),
        ("if a: pass", {"if not a:"}),
        ("while a == b: break", {"while a != b:", "pass", "continue"}),
        ("def f(): return a", {"return None"}),
        ("def f(): return", set()),
        ("assert a, 'says why'", {"assert not a, 'says why'", "pass"}),
    ],
)
def test_every_kind_of_edit(source: str, expected: set[str]) -> None:
    assert after(source) == expected


def test_types_texts_and_imports_are_left_alone() -> None:
    assert (
        mutants_of("x.py", "'''1'''\nimport a\nx: Literal[1]\ndef f(a: int) -> T[1]: ...\n") == []
    )


def test_a_mutant_does_what_it_says() -> None:
    mutant = next(m for m in mutants_of("x.py", "def f(): return 1 + 2") if "1 - 2" in m.mutation)
    assert (mutant.function, mutant.mutation) == ("f", "return 1 + 2  =>  return 1 - 2")
    names: dict = {}
    exec(mutant.code, names)
    assert names["f"]() == -1


def test_equal_edits_are_told_apart() -> None:
    keys = [mutant.key for mutant in mutants_of("x.py", "def f():\n    a()\n    a()")]
    assert len(set(keys)) == len(keys) == 2
