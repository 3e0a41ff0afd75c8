"""Example of tool use: a random price list, the tools lookup and calculator, and questions.

All data is generated from seeds and ``example.yaml``. A question is about two items. A hash of this
pair determines the split, so item pairs of validation never occur in training.

The docstrings and errors of ``lookup`` and ``calculator`` are shown to the policy.
"""

import ast
import operator
import random
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

from agent_system.environments.env import Task
from agent_system.environments.env_package.tools.settings import ToolsSettings
from verl.utils.files import read_yaml_table
from verl.utils.seeds import derive_seed

DATA_SOURCE = "tools/shelf"
_EXAMPLE_TABLES = read_yaml_table(__file__, "example.yaml")
VAL_DIVISOR = 5  # one pair of items in five belongs to validation
MAX_EXPRESSION_LENGTH = 200  # characters of an expression for the calculator
MAX_MAGNITUDE = 10**12  # maximum absolute value of intermediate results
OPERATORS_BY_NODE_TYPE: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
}


@cache
def generate_item_table() -> dict[str, dict[str, int]]:
    """Return price in coins, weight in grams and number in stock of each item."""
    rng = random.Random(derive_seed(DATA_SOURCE, "shelf"))
    return {
        item: {
            "price": rng.randrange(3, 90),
            "weight": 10 * rng.randrange(2, 99),
            "stock": rng.randrange(2, 40),
        }
        for item in _EXAMPLE_TABLES["items"]
    }


def lookup(item: str, field: Literal["price", "weight", "stock"]) -> int:
    """What the shelf says of an item: its price in coins, its weight in grams, or how many there
    are in stock.
    """
    if item not in generate_item_table():
        raise KeyError(f"no {item!r} on the shelf")
    return generate_item_table()[item][field]


def calculator(expression: str) -> int | float:
    """The value of an expression with numbers, + - * / // % and brackets, such as 3 * (17 + 4)."""
    if len(expression) > MAX_EXPRESSION_LENGTH:
        raise ValueError(f"longer than {MAX_EXPRESSION_LENGTH} characters")
    return _evaluate_node(ast.parse(expression, mode="eval").body)


def _evaluate_node(node: ast.AST) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value: Any = node.value
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS_BY_NODE_TYPE:
        value = OPERATORS_BY_NODE_TYPE[type(node.op)](
            _evaluate_node(node.left), _evaluate_node(node.right)
        )
    elif isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS_BY_NODE_TYPE:
        value = OPERATORS_BY_NODE_TYPE[type(node.op)](_evaluate_node(node.operand))
    else:
        raise ValueError("only numbers, + - * / // % and brackets")
    if abs(value) > MAX_MAGNITUDE:
        raise ValueError(f"larger than {MAX_MAGNITUDE}")
    return value


FUNCTIONS = (calculator, lookup)


def list_tasks(settings: ToolsSettings, split: str) -> list[Task]:
    """Return one task per distinct question about two items.

    The number is smaller than requested if 1000 draws in a row give no new question.
    """
    task_count = settings.val_tasks if split == "val" else settings.train_tasks
    tasks_by_id: dict[str, Task] = {}
    draw_number = last_new_draw_number = 0
    while len(tasks_by_id) < task_count and draw_number < last_new_draw_number + 1000:
        rng = random.Random(derive_seed(DATA_SOURCE, settings.task_seed, split, draw_number))
        draw_number += 1
        first_item, second_item = rng.sample(_EXAMPLE_TABLES["items"], 2)
        is_validation = (
            derive_seed(DATA_SOURCE, "pair", *sorted((first_item, second_item))) % VAL_DIVISOR == 0
        )
        if is_validation != (split == "val"):
            continue
        task = _make_question(rng, first_item, second_item)
        if task["task_id"] not in tasks_by_id:
            tasks_by_id[task["task_id"]] = task
            last_new_draw_number = draw_number
    return list(tasks_by_id.values())


def _make_question(rng: random.Random, first_item: str, second_item: str) -> Task:
    first_number, second_number = rng.randrange(2, 10), rng.randrange(2, 10)
    template_index = rng.randrange(len(_EXAMPLE_TABLES["questions"]))
    template = _EXAMPLE_TABLES["questions"][template_index]
    item_names = {"first": first_item, "second": second_item}
    item_values = {"a": generate_item_table()[first_item], "b": generate_item_table()[second_item]}
    expression = template["expression"].format(n=first_number, m=second_number, **item_values)
    return {
        "task_id": (
            f"{DATA_SOURCE}/{template_index}-{first_item}-{second_item}"
            f"-{first_number}-{second_number}"
        ),
        "data_source": DATA_SOURCE,
        "messages": [
            {
                "role": "user",
                "content": template["text"].format(n=first_number, m=second_number, **item_names),
            }
        ],
        "ground_truth": str(calculator(expression)),
        "extra_info": {
            "lookups": [
                lookup_template.format(**item_names).split()
                for lookup_template in template["lookups"]
            ],
            "sum": expression,
        },
    }
