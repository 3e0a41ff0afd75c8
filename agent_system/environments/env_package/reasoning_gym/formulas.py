"""Safe parser for formulas and lists of a policy: a small grammar, checked node by node.

Graders that evaluate a text receive one that is generated from the parsed nodes. They never receive
the text of the policy.
"""

import ast
import math
import operator
from collections.abc import Callable, Collection
from fractions import Fraction
from typing import Any

MAX_FORMULA_CHARACTERS = 1000  # maximum number of characters of a formula
MAX_LIST_CHARACTERS = 20_000  # maximum number of characters of a list
MAX_ITEMS = 10_000
MAX_FORMULA_DEPTH = 100  # maximum nesting of operations in a formula
MAX_LIST_DEPTH = 3
MAX_MAGNITUDE = 10**12  # maximum magnitude of a number in a formula
MAX_EXPONENT = 64  # maximum exponent, and maximum product of the exponents of nested powers
ARITHMETIC: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


class UnreadableFormula(ValueError):
    """The text does not follow the grammar, or it is too large."""


def parse_formula(
    text: str, names: Collection[str] = (), functions: Collection[str] = ()
) -> ast.expr:
    """Parse a formula of numbers, ``+ - * /`` and brackets.

    The given ``names`` and ``functions`` are also allowed. With ``names``, powers with limited
    exponents are allowed too. Raises ``UnreadableFormula``.
    """
    node = _parse_expression(text, MAX_FORMULA_CHARACTERS)
    _check_node(node, frozenset(names), frozenset(functions), MAX_FORMULA_DEPTH, MAX_EXPONENT)
    return node


def exact_value(node: ast.expr) -> Fraction:
    """Return the value of a formula without names.

    Raises ``UnreadableFormula`` and ``ZeroDivisionError``.
    """
    match node:
        case ast.Constant():
            return Fraction(str(node.value))
        case ast.BinOp() if type(node.op) in ARITHMETIC:
            return ARITHMETIC[type(node.op)](exact_value(node.left), exact_value(node.right))
        case ast.UnaryOp():
            return ARITHMETIC[type(node.op)](exact_value(node.operand))
    raise UnreadableFormula(f"{type(node).__name__} has no value")


def integers_in(node: ast.expr) -> list[int]:
    """Return the integers in a formula, in ascending order."""
    return sorted(
        subnode.value
        for subnode in ast.walk(node)
        if isinstance(subnode, ast.Constant) and isinstance(subnode.value, int)
    )


def parse_list(text: str) -> Any:
    """Parse ``text`` as a Python literal: a text, an integer, a list or a tuple.

    Raises ``UnreadableFormula``.
    """
    try:
        value = ast.literal_eval(_parse_expression(text, MAX_LIST_CHARACTERS))
    except (ValueError, TypeError, RecursionError) as error:
        raise UnreadableFormula(str(error)) from error
    if _count_items(value, MAX_LIST_DEPTH) > MAX_ITEMS:
        raise UnreadableFormula(f"more than {MAX_ITEMS} items")
    return value


def _parse_expression(text: str, longest: int) -> ast.expr:
    if len(text) > longest:
        raise UnreadableFormula(f"longer than {longest} characters")
    try:
        return ast.parse(text.strip(), mode="eval").body
    # Causes: null bytes, lone surrogates, numbers with thousands of digits, too deep nesting.
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnreadableFormula(str(error)) from error


def _check_node(
    node: ast.expr, names: frozenset[str], functions: frozenset[str], depth: int, exponent: int
) -> None:
    """Raise ``UnreadableFormula`` for a node that is not allowed.

    ``depth`` is the allowed nesting and ``exponent`` the largest allowed exponent.
    """
    if depth <= 0:
        raise UnreadableFormula(f"more than {MAX_FORMULA_DEPTH} nested operations")
    child_nodes: list[ast.expr] = []
    match node:
        case ast.Constant():
            _check_number(node.value)
        case ast.Name() if node.id in names:
            pass
        case ast.UnaryOp(op=ast.UAdd() | ast.USub()):
            child_nodes = [node.operand]
        case ast.BinOp() if type(node.op) in ARITHMETIC:
            child_nodes = [node.left, node.right]
        case ast.BinOp(op=ast.Pow()) if names:
            exponent = _remaining_exponent(node.right, exponent)
            child_nodes = [node.left, node.right]
        case ast.Call(func=ast.Name(id=function_name), args=[_] | [_, ast.Name()], keywords=[]) if (
            function_name in functions
        ):
            child_nodes = node.args
        case _:
            raise UnreadableFormula(f"{type(node).__name__} is not allowed")
    for child_node in child_nodes:
        _check_node(child_node, names, functions, depth - 1, exponent)


def _remaining_exponent(node: ast.expr, largest: int) -> int:
    """Return the largest exponent allowed in the base of a power whose exponent is ``node``.

    The product of nested exponents must be at most ``largest``. Raises ``UnreadableFormula``.
    """
    exponent_nodes = list(ast.walk(node))
    if any(isinstance(exponent_node, ast.Pow) for exponent_node in exponent_nodes):
        raise UnreadableFormula("an exponent contains a power")
    # Names count as 1, and no term is simplified: 9 ** (99999999 + 0 * x) is too large.
    value = _bound_magnitude(node)
    if value > largest:
        raise UnreadableFormula(f"an exponent is larger than {largest}")
    return largest if value <= 1 else int(largest / value)


def _bound_magnitude(node: ast.expr) -> float:
    """Return an upper bound of the magnitude of an exponent. Raises ``UnreadableFormula``."""
    match node:
        case ast.Constant(value=int() | float() as value):
            return abs(value)
        case ast.BinOp(op=ast.Add() | ast.Sub()):
            return _bound_magnitude(node.left) + _bound_magnitude(node.right)
        case ast.BinOp(op=ast.Mult()):
            return max(1.0, _bound_magnitude(node.left)) * max(1.0, _bound_magnitude(node.right))
        case ast.BinOp(op=ast.Div(), right=ast.Constant(value=int() | float() as value)) if (
            abs(value) >= 1
        ):
            return _bound_magnitude(node.left) / abs(value)
        case ast.UnaryOp():
            return _bound_magnitude(node.operand)
        case ast.Name():
            return 1.0
        case ast.Call():
            return max([1.0, *(_bound_magnitude(argument) for argument in node.args)])
    raise UnreadableFormula(f"an exponent contains {type(node).__name__}, which is not allowed")


def _check_number(value: object) -> None:
    # ``isinstance`` alone would accept bool, a subclass of int.
    if type(value) not in (int, float) or not isinstance(value, int | float):
        raise UnreadableFormula(f"{type(value).__name__} is not a number")
    if not math.isfinite(value) or abs(value) > MAX_MAGNITUDE:
        raise UnreadableFormula(f"a number is larger than {MAX_MAGNITUDE}")


def _count_items(value: object, depth: int) -> int:
    """Count the items of ``value``, nested ones included. Raises ``UnreadableFormula``."""
    if isinstance(value, list | tuple) and depth > 0:
        return 1 + sum(_count_items(item, depth - 1) for item in value)
    if isinstance(value, str) or type(value) is int:
        return 1
    raise UnreadableFormula(f"{type(value).__name__} is not allowed here, or nested too deeply")
