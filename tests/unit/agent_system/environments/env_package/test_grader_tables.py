"""Tables of the graders of tools, arithmetic and shop: actions and their rewards."""

from dataclasses import replace
from typing import Any

import pytest

from agent_system.environments.env_package.shop.catalogue import Product, score_purchase
from agent_system.environments.env_package.tools import package as tools

R, W = 1.0, 0.0  # right, wrong
TOOLS = [
    ("138", R),
    ("138.0", R),
    ("138 coins", R),
    ("It is 138.", R),
    ("**138**", R),
    ("\\boxed{138}", R),
    ("one hundred thirty-eight", R),
    ("<answer>138</answer>", R),
    ("<think>100 + 38</think> 138", R),
    ("<think>140</think><answer>138</answer>", R),
    ("It costs 140.", W),
    ("1380", W),
    ("-138", W),
    ("13.8", W),
    ("138 or 140", W),
    ("100 + 38", W),
    ("<answer>140</answer> 138", W),
    ("<think>138", W),
    ("<think>138</think>", W),
    ("<think>138</think> 140", W),
    ("", W),
    ("nan", W),
    ("1" * 500, W),
]


@pytest.mark.parametrize(("text", "grade"), TOOLS)
def test_tools_answer_gets_the_reward_of_the_table(text, grade):
    env = tools.PACKAGE.make(tools.PACKAGE.read_settings({}))
    (task, *_) = tools.PACKAGE.tasks(tools.PACKAGE.read_settings({"train_tasks": 1}), "train")
    env.reset({**task, "ground_truth": "138"}, 0)
    action, _ = tools.PACKAGE.project(text)
    _, reward, _, info = env.step(action)
    assert (reward, info["won"]) == (grade, grade == R)
    env.close()


ARITHMETIC = {
    "countdown": {"answer": "3*4+2", "metadata": {"numbers": [3, 4, 2], "target": 14}},
    "puzzle24": {"answer": "1*2*3*4", "metadata": {"numbers": [1, 2, 3, 4]}},
    "coin_flip": {"answer": "0.125", "metadata": {}},
}
FORMULAS = [
    ("countdown", "3*4+2", True),
    ("countdown", "2 * (3 + 4)", True),
    ("countdown", "((3+4))*2", True),
    ("countdown", "14", False),
    ("countdown", "3+4*2", False),
    ("countdown", "7*2", False),
    ("countdown", "(3+4)*2 = 14", False),
    ("countdown", "3*4+2+0", False),
    ("countdown", "3+4+7", False),
    ("countdown", "3*4+2*1**9", False),
    ("countdown", "nan", False),
    ("countdown", "", False),
    ("puzzle24", "1*2*3*4", True),
    ("puzzle24", "(1+2+3)*4", True),
    ("puzzle24", "(4+2)*(3+1)", True),
    ("puzzle24", "24", False),
    ("puzzle24", "4*3*2", False),
    ("puzzle24", "12*2", False),
    ("puzzle24", "1*2*3*4+1/2", False),
    ("puzzle24", "6*4*1", False),
    ("coin_flip", "0.125", True),
    ("coin_flip", "1/8", True),
    ("coin_flip", "0.12500001", True),
    ("coin_flip", "0.25/2", True),
    ("coin_flip", "0", False),
    ("coin_flip", "0.1", False),
    ("coin_flip", "0.13", False),
    ("coin_flip", "1/0", False),
    ("coin_flip", "nan", False),
    ("coin_flip", "1/8 or 1/4", False),
]


@pytest.mark.parametrize(("generator", "answer", "is_success"), FORMULAS)
def test_formula_gets_the_success_of_the_table(generator, answer, is_success):
    pytest.importorskip("reasoning_gym")
    from agent_system.environments.env_package.reasoning_gym.package import (
        PACKAGE,
        ReasoningGymEnv,
    )

    env = ReasoningGymEnv(
        PACKAGE.read_settings({"task": generator, "train_tasks": 1, "val_tasks": 1})
    )
    env.reset({"number": 0}, 0)
    env.entry = {"question": "?", **ARITHMETIC[generator]}
    _, reward, done, info = env.step(answer)
    assert done and info["won"] is is_success and (reward == 1.0) is is_success


CUP = Product("i", "cup", "mug", "kitchen", ("blue", "large"), {"color": ("red", "tan")}, 9.0)
WISH = {
    "kind": "mug",
    "department": "kitchen",
    "attributes": ["blue", "large"],
    "options": {"color": "red"},
    "max_price": 10.0,
}
RED = {"color": "red"}
PURCHASES: list[tuple[dict[str, Any], dict[str, str], dict[str, Any], float]] = [
    ({}, RED, {}, 1.0),
    ({}, RED | {"size": "small"}, {}, 1.0),
    ({}, {}, {}, 3 / 4),
    ({}, {"color": "tan"}, {}, 3 / 4),
    ({}, {"size": "red"}, {}, 3 / 4),
    ({"attributes": ("blue",)}, RED, {}, 3 / 4),
    ({"attributes": ("blue", "blue")}, RED, {}, 3 / 4),
    ({"attributes": ()}, {}, {}, 1 / 4),
    ({"attributes": ("bluegreen", "large")}, RED, {}, 3 / 4),
    ({"price": 10.0}, RED, {}, 3 / 4),
    ({"price": 11.0, "attributes": ()}, {}, {}, 0.0),
    ({"kind": "pot"}, RED, {}, 0.5),
    ({"kind": "pot"}, {}, {}, 3 / 8),
    ({"kind": "tent", "department": "camping"}, RED, {}, 0.1),
    ({"department": "camping"}, RED, {}, 1.0),
    ({}, {}, {"options": {}}, 1.0),
    ({"attributes": ()}, {}, {"options": {}, "attributes": []}, 1.0),
]


@pytest.mark.parametrize(("product", "chosen", "wish", "reward"), PURCHASES)
def test_purchase_gets_the_reward_of_the_table(product, chosen, wish, reward):
    assert score_purchase(replace(CUP, **product), chosen, WISH | wish) == pytest.approx(reward)
