"""Safe parser for formulas and lists that a policy writes.

It accepts a small grammar and checks every node. Graders that evaluate a text receive one that is
generated from the parsed nodes. They never receive the text of the policy.
"""

import ast
import math
import operator
from collections.abc import Callable, Collection
from fractions import Fraction
from typing import Any

MAX_FORMULA_CHARACTERS = 1000  # maximum length of a formula as text
MAX_LIST_CHARACTERS = 20_000  # maximum length of a list as text
MAX_ITEMS = 10_000  # maximum number of items of a list, nested ones included
MAX_FORMULA_DEPTH = 100  # maximum nesting of operations in a formula
MAX_LIST_DEPTH = 3  # maximum nesting of lists
MAX_NESTED_FUNCTIONS = 4  # maximum nesting of functions, such as 2 for sin(exp(x))
MAX_MAGNITUDE = 10**12  # maximum magnitude of a number in a formula
MAX_EXPONENT = 64  # maximum exponent, and maximum product of the exponents of nested powers
OPERATORS_BY_NODE_TYPE: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


class UnreadableFormulaError(ValueError):
    """Error: the text does not follow the grammar, or it is too large."""


def parse_formula(
    text: str, variable_names: Collection[str] = (), functions: Collection[str] = ()
) -> ast.expr:
    """Parse a formula of numbers, ``+ - * /`` and brackets. Raises ``UnreadableFormulaError``.

    It may also contain the variables ``variable_names`` and calls of ``functions``. With variables,
    powers with limited exponents are allowed too.
    """
    node = _parse_expression(text, MAX_FORMULA_CHARACTERS)
    _check_node(
        node, frozenset(variable_names), frozenset(functions), MAX_FORMULA_DEPTH, MAX_EXPONENT
    )
    # The time of sympy to differentiate and simplify grows exponentially with the nesting.
    if functions and _count_nested_functions(node) > MAX_NESTED_FUNCTIONS:
        raise UnreadableFormulaError(f"more than {MAX_NESTED_FUNCTIONS} nested functions")
    return node


def _count_nested_functions(node: ast.AST) -> int:
    child_depth = max(map(_count_nested_functions, ast.iter_child_nodes(node)), default=0)
    return child_depth + isinstance(node, ast.Call)


def compute_value(node: ast.expr) -> Fraction:
    """Return the exact value of a parsed formula without variables.

    Raises ``UnreadableFormulaError`` and ``ZeroDivisionError``.
    """
    match node:
        case ast.Constant():
            return Fraction(str(node.value))
        case ast.BinOp() if type(node.op) in OPERATORS_BY_NODE_TYPE:
            return OPERATORS_BY_NODE_TYPE[type(node.op)](
                compute_value(node.left), compute_value(node.right)
            )
        case ast.UnaryOp():
            return OPERATORS_BY_NODE_TYPE[type(node.op)](compute_value(node.operand))
    raise UnreadableFormulaError(f"{type(node).__name__} has no value")


def list_integers(node: ast.expr) -> list[int]:
    return sorted(
        subnode.value
        for subnode in ast.walk(node)
        if isinstance(subnode, ast.Constant) and isinstance(subnode.value, int)
    )


def parse_list(text: str) -> Any:
    """Parse ``text`` as a Python literal: a text, an integer, a list or a tuple.

    Raises ``UnreadableFormulaError``.
    """
    try:
        value = ast.literal_eval(_parse_expression(text, MAX_LIST_CHARACTERS))
    except (ValueError, TypeError, RecursionError) as error:
        raise UnreadableFormulaError(str(error)) from error
    if _count_items(value, MAX_LIST_DEPTH) > MAX_ITEMS:
        raise UnreadableFormulaError(f"more than {MAX_ITEMS} items")
    return value


def _parse_expression(text: str, max_length: int) -> ast.expr:
    if len(text) > max_length:
        raise UnreadableFormulaError(f"longer than {max_length} characters")
    try:
        return ast.parse(text.strip(), mode="eval").body
    # Null bytes, lone surrogates, very long numbers and deep nesting cause these errors.
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnreadableFormulaError(str(error)) from error


def _check_node(
    node: ast.expr,
    variable_names: frozenset[str],
    functions: frozenset[str],
    max_depth: int,
    max_exponent: int,
) -> None:
    """Raise ``UnreadableFormulaError`` if ``node`` or a node below it is not allowed."""
    if max_depth <= 0:
        raise UnreadableFormulaError(f"more than {MAX_FORMULA_DEPTH} nested operations")
    child_nodes: list[ast.expr] = []
    match node:
        case ast.Constant():
            _check_number(node.value)
        case ast.Name() if node.id in variable_names:
            pass
        case ast.UnaryOp(op=ast.UAdd() | ast.USub()):
            child_nodes = [node.operand]
        case ast.BinOp() if type(node.op) in OPERATORS_BY_NODE_TYPE:
            child_nodes = [node.left, node.right]
        case ast.BinOp(op=ast.Pow()) if variable_names:
            max_exponent = _compute_allowed_exponent(node.right, max_exponent)
            child_nodes = [node.left, node.right]
        case ast.Call(func=ast.Name(id=function_name), args=[_] | [_, ast.Name()], keywords=[]) if (
            function_name in functions
        ):
            child_nodes = node.args
        case _:
            raise UnreadableFormulaError(f"{type(node).__name__} is not allowed")
    for child_node in child_nodes:
        _check_node(child_node, variable_names, functions, max_depth - 1, max_exponent)


def _compute_allowed_exponent(node: ast.expr, max_exponent: int) -> int:
    """Return the largest allowed exponent inside the base of a power with the exponent ``node``.

    The product of nested exponents must be at most ``max_exponent``. Example: with 64, the base of
    ``(...)**4`` may contain exponents up to 16. Raises ``UnreadableFormulaError``.
    """
    exponent_nodes = list(ast.walk(node))
    if any(isinstance(exponent_node, ast.Pow) for exponent_node in exponent_nodes):
        raise UnreadableFormulaError("an exponent contains a power")
    # The bound uses 1 for each name and does not simplify terms, so it refuses an exponent such as
    # 99999999 + 0 * x.
    exponent_bound = _bound_magnitude(node)
    if exponent_bound > max_exponent:
        raise UnreadableFormulaError(f"an exponent is larger than {max_exponent}")
    return max_exponent if exponent_bound <= 1 else int(max_exponent / exponent_bound)


def _bound_magnitude(node: ast.expr) -> float:
    """Return an upper bound of the magnitude of an exponent. Raises ``UnreadableFormulaError``."""
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
    raise UnreadableFormulaError(
        f"an exponent contains {type(node).__name__}, which is not allowed"
    )


def _check_number(value: object) -> None:
    # Compare the type, because ``isinstance`` would accept bool, a subclass of int.
    if type(value) not in (int, float) or not isinstance(value, int | float):
        raise UnreadableFormulaError(f"{type(value).__name__} is not a number")
    if not math.isfinite(value) or abs(value) > MAX_MAGNITUDE:
        raise UnreadableFormulaError(f"a number is larger than {MAX_MAGNITUDE}")


def _count_items(value: object, max_depth: int) -> int:
    """Return the number of items of ``value``, nested ones included.

    Raises ``UnreadableFormulaError`` for types that are not allowed, and if lists are nested deeper
    than ``max_depth``.
    """
    if isinstance(value, list | tuple) and max_depth > 0:
        return 1 + sum(_count_items(item, max_depth - 1) for item in value)
    if isinstance(value, str) or type(value) is int:
        return 1
    raise UnreadableFormulaError(
        f"{type(value).__name__} is not allowed here, or nested too deeply"
    )
