"""Example of tool use: a random price list, a lookup, a calculator, and questions.

All data is generated from seeds and ``example.yaml``. A hash of the pair of items decides the split
of a question, so the item pairs of validation never occur in training.

The docstrings and errors of ``lookup`` and ``calculator`` are shown to the policy.
"""

import ast
import operator
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from agent_system.environments.env import Task
from agent_system.environments.env_package.tools.settings import ToolsSettings
from verl.utils.seeds import derive_seed

DATA_SOURCE = "tools/shelf"
_TABLES = yaml.safe_load(Path(__file__).with_name("example.yaml").read_text(encoding="utf-8"))
VAL_DIVISOR = 5  # one pair of items in five is held out
MAX_EXPRESSION_LENGTH = 200  # characters of an expression
MAX_VALUE = 10**12  # absolute value of intermediate results
OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
}


@cache
def item_table() -> dict[str, dict[str, int]]:
    """Return price in coins, weight in grams and number in stock of each item."""
    draw = random.Random(derive_seed(DATA_SOURCE, "shelf"))
    return {
        item: {
            "price": draw.randrange(3, 90),
            "weight": 10 * draw.randrange(2, 99),
            "stock": draw.randrange(2, 40),
        }
        for item in _TABLES["items"]
    }


def lookup(item: str, field: Literal["price", "weight", "stock"]) -> int:
    """What the shelf says of an item: its price in coins, its weight in grams, or how many there
    are in stock.
    """
    if item not in item_table():
        raise KeyError(f"no {item!r} on the shelf")
    return item_table()[item][field]


def calculator(expression: str) -> int | float:
    """The value of an expression with numbers, + - * / // % and brackets, such as 3 * (17 + 4)."""
    if len(expression) > MAX_EXPRESSION_LENGTH:
        raise ValueError(f"longer than {MAX_EXPRESSION_LENGTH} characters")
    return _evaluate_node(ast.parse(expression, mode="eval").body)


def _evaluate_node(node: ast.AST) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value: Any = node.value
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        value = OPERATORS[type(node.op)](_evaluate_node(node.left), _evaluate_node(node.right))
    elif isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        value = OPERATORS[type(node.op)](_evaluate_node(node.operand))
    else:
        raise ValueError("only numbers, + - * / // % and brackets")
    if abs(value) > MAX_VALUE:
        raise ValueError(f"larger than {MAX_VALUE}")
    return value


FUNCTIONS = (calculator, lookup)


def list_tasks(settings: ToolsSettings, split: str) -> list[Task]:
    """Return distinct questions about two items each.

    There are fewer than the settings ask for if 1000 draws in a row give no new question.
    """
    task_count = settings.val_tasks if split == "val" else settings.train_tasks
    tasks_by_id: dict[str, Task] = {}
    attempt = last_new = 0
    while len(tasks_by_id) < task_count and attempt < last_new + 1000:
        draw = random.Random(derive_seed(DATA_SOURCE, settings.task_seed, split, attempt))
        attempt += 1
        first, second = draw.sample(_TABLES["items"], 2)
        held_out = derive_seed(DATA_SOURCE, "pair", *sorted((first, second))) % VAL_DIVISOR == 0
        if held_out != (split == "val"):
            continue
        task = _make_question(draw, first, second)
        if task["task_id"] not in tasks_by_id:
            tasks_by_id[task["task_id"]] = task
            last_new = attempt
    return list(tasks_by_id.values())


def _make_question(rng: random.Random, first: str, second: str) -> Task:
    n, m = rng.randrange(2, 10), rng.randrange(2, 10)
    number = rng.randrange(len(_TABLES["questions"]))
    template = _TABLES["questions"][number]
    names = {"first": first, "second": second}
    items = {"a": item_table()[first], "b": item_table()[second]}
    expression = template["expression"].format(n=n, m=m, **items)
    return {
        "task_id": f"{DATA_SOURCE}/{number}-{first}-{second}-{n}-{m}",
        "data_source": DATA_SOURCE,
        "messages": [{"role": "user", "content": template["text"].format(n=n, m=m, **names)}],
        "ground_truth": str(calculator(expression)),
        "extra_info": {
            "lookups": [one.format(**names).split() for one in template["lookups"]],
            "sum": expression,
        },
    }
