"""The edits that `mutants.py` makes: every small change of a fixed set, everywhere it fits.

They are chosen by kind, never by place: comparisons, boolean and arithmetic operators, integer and
boolean constants, bounds of slices and ranges, conditions, returned values, deleted statements.
"""

import ast
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType
from typing import TypeVar

Node = TypeVar("Node", bound=ast.AST)

OPPOSITES: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.FloorDiv,),
    ast.FloorDiv: (ast.Mult,),
    ast.Mod: (ast.Mult,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
    ast.LShift: (ast.RShift,),
    ast.RShift: (ast.LShift,),
}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
DELETED = (ast.Expr, ast.Assign, ast.AugAssign, ast.Delete, ast.Assert, ast.Raise)
# Not behaviour: types, texts for people, and memory layout.
SKIPPED_FIELDS = {"annotation", "returns", "msg", "decorator_list"}
SKIPPED_NODES = (ast.JoinedStr, ast.Import, ast.ImportFrom)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One edit. Its name has no line number, so that it outlives edits elsewhere."""

    file: str
    function: str
    mutation: str
    code: CodeType

    @property
    def key(self) -> tuple[str, str, str]:
        return self.file, self.function, self.mutation


def replacements(field: str, node: ast.AST) -> Iterator[ast.AST]:
    """What `node`, found in `field` of its parent, is replaced by: one mutant each."""
    for other in OPPOSITES.get(type(node), ()):
        yield other()
    if isinstance(node, ast.stmt):
        yield from _statements(node)
    elif isinstance(node, ast.Slice):
        for side in ("lower", "upper"):
            bound = getattr(node, side)
            if bound is not None:
                yield from (_edited(node, side, to) for to in (None, *_shifted(bound)))
    elif isinstance(node, ast.expr):
        yield from _expressions(node)
        if field in ("test", "ifs") and not isinstance(node, ast.Compare | ast.UnaryOp):
            yield ast.UnaryOp(ast.Not(), node)


def _statements(node: ast.stmt) -> Iterator[ast.stmt]:
    match node:
        case ast.Continue():
            yield from (ast.Pass(), ast.Break())
        case ast.Break():
            yield from (ast.Pass(), ast.Continue())
        case ast.Return(value=ast.Constant(value=None)):
            pass
        case ast.Return(value=ast.expr()):
            yield ast.Return(ast.Constant(None))
        case ast.AnnAssign(value=ast.expr()):
            yield ast.Pass()
        case _ if isinstance(node, DELETED):
            yield ast.Pass()


def _expressions(node: ast.expr) -> Iterator[ast.expr]:
    match node:
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield from (ast.Constant(value + 1), ast.Constant(value - 1))
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.Call(func=ast.Name(id="reversed"), args=[only]):
            yield only
        case ast.Call(func=ast.Name(id=name)) if name in CALLS:
            yield _edited(node, "func", ast.Name(CALLS[name], ast.Load()))
        case ast.Call(func=ast.Name(id="range"), args=bounds):
            for i, bound in enumerate(bounds):
                for other in _shifted(bound):
                    yield _edited(node, "args", [*bounds[:i], other, *bounds[i + 1 :]])


def _edited(node: Node, field: str, value: object) -> Node:
    edited = copy.copy(node)
    setattr(edited, field, value)
    return edited


def _shifted(bound: ast.expr) -> Iterator[ast.expr]:
    if not isinstance(bound, ast.Constant):  # those are mutated as constants
        yield from (ast.BinOp(bound, op, ast.Constant(1)) for op in (ast.Add(), ast.Sub()))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def mutants_of(file: str, source: str) -> list[Mutant]:
    """Every mutant of one file, in the order of its text."""
    tree = ast.parse(source)
    mutants: list[Mutant] = []
    seen: Counter[tuple[str, str]] = Counter()

    def place(
        parent: ast.AST, field: str, i: int | None, node: ast.AST, within: tuple[str, ast.stmt]
    ) -> None:
        function, statement = within
        before = _headline(statement)
        for other in replacements(field, node):
            _put(parent, field, i, other)
            after = "pass" if isinstance(other, ast.Pass) else _headline(statement, node, other)
            code = compile(ast.fix_missing_locations(tree), file, "exec")
            _put(parent, field, i, node)
            mutation = f"{before}  =>  {after}"
            seen[function, mutation] += 1
            if seen[function, mutation] > 1:
                mutation += f"  (#{seen[function, mutation]})"
            mutants.append(Mutant(file, function, mutation, code))

    def visit(parent: ast.AST, names: tuple[str, ...], around: ast.stmt | None) -> None:
        for field, value in ast.iter_fields(parent):
            if field in SKIPPED_FIELDS:
                continue
            children = list(value) if isinstance(value, list) else [value]
            for i, node in enumerate(children):
                if not isinstance(node, ast.AST) or _is_text(node) or _is_layout(node):
                    continue
                statement = node if isinstance(node, ast.stmt) else around
                assert statement is not None
                within = (".".join(names), statement)
                place(parent, field, i if isinstance(value, list) else None, node, within)
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    visit(node, (*names, node.name), statement)
                else:
                    visit(node, names, statement)

    visit(tree, (), None)
    return mutants


def _is_layout(node: ast.AST) -> bool:
    slots = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__"
    return slots or isinstance(node, SKIPPED_NODES)


def _put(parent: ast.AST, field: str, i: int | None, node: ast.AST) -> None:
    if i is None:
        setattr(parent, field, node)
    else:
        getattr(parent, field)[i] = node


def _headline(statement: ast.stmt, old: ast.AST | None = None, new: ast.AST | None = None) -> str:
    """The statement's first line. `new` is taken where the statement itself is what changed."""
    return ast.unparse(new if new is not None and old is statement else statement).split("\n")[0]
