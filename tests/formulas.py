"""What a planner's figure is by its own formula and inputs."""

import ast
import operator
import re
from collections.abc import Callable

from foreword.sim.plan import Figure

OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def by_formula(figure: Figure) -> float:
    """Every word of the formula has to be one of the inputs."""
    text = figure.formula
    for name in sorted(figure.inputs, key=len, reverse=True):
        text = text.replace(name, f"({figure.inputs[name]!r})")
    text = text.replace("×", "*").replace("÷", "/")
    assert not re.search("[a-z]{2}", text), text
    return _evaluated(ast.parse(text, mode="eval").body)


def _evaluated(node: ast.expr) -> float:
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](_evaluated(node.left), _evaluated(node.right))
    assert isinstance(node, ast.Constant)
    assert isinstance(node.value, int | float)
    return float(node.value)
