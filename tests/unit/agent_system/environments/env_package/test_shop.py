"""Tests of the shop: pages and clicks, the reward, the catalogue and its goals."""

from dataclasses import replace

import pytest

from agent_system.environments.env_package.shop.catalogue import (
    find_products,
    make_catalogue,
    score_purchase,
)
from agent_system.environments.env_package.shop.package import PACKAGE, ShopEnv, list_tasks
from tests.helpers.expert_policies import buy_the_goal
from tests.helpers.refusals import mentions

read = PACKAGE.read_settings

FEW = {"products": 60}


@pytest.fixture
def task():
    return list_tasks(read(FEW), "train")[0]


@pytest.fixture
def env(task):
    shop = ShopEnv(read({**FEW, "page_size": 2, "results": 5}))
    shop.reset(task, 0)
    return shop


def read_actions(outcome):
    return outcome[0].info["admissible_actions"]


def open_goal_item(env, task):
    """Open the page of the product that the goal was made from, and return the outcome."""
    goal = task["goal"]
    outcome = env.step(
        f"search[{goal['kind']} {' '.join(goal['attributes'])} {goal['options']['color']}]"
    )
    while f"click[{goal['item_id']}]" not in read_actions(outcome):
        outcome = env.step("click[next >]")
    return env.step(f"click[{goal['item_id']}]")


def test_first_page_accepts_only_a_search(env, task):
    start = env.reset(task, 0)
    assert task["goal"]["instruction"] in start.text and read_actions((start,)) == [
        "search[<words>]"
    ]
    assert not env.step("click[back to search]")[3]["is_action_valid"]
    outcome = env.step("SEARCH[ water  bottle ]")
    assert outcome[1:] == (0.0, False, {"won": False, "is_action_valid": True})
    assert "Page 1 of 3, 5 products" in outcome[0].text
    assert not env.step("search[mug]")[3]["is_action_valid"], (
        "a search is valid only on the search page"
    )


def test_result_pages_can_be_turned_and_left(env):
    first = env.step("search[water bottle]")
    assert (
        read_actions(first)[:2] == ["click[back to search]", "click[next >]"]
        and len(read_actions(first)) == 4
    )
    second = env.step("click[next >]")
    assert read_actions(second)[:3] == ["click[back to search]", "click[< prev]", "click[next >]"]
    third = env.step("click[Next >]")
    assert "click[next >]" not in read_actions(third) and len(read_actions(third)) == 3
    assert env.step("click[< prev]")[0].anchor == second[0].anchor
    assert not set(read_actions(first)[2:]) & set(read_actions(second)[3:])
    assert read_actions(env.step("click[back to search]")) == ["search[<words>]"]


def test_search_without_results_shows_an_empty_page(env):
    outcome = env.step("search[zeppelin]")
    assert "Page 1 of 1, 0 products" in outcome[0].text and read_actions(outcome) == [
        "click[back to search]"
    ]


def test_item_page_lists_options_and_details(env, task):
    outcome = open_goal_item(env, task)
    product = make_catalogue(60)[task["goal"]["item_id"]]
    values = [f"click[{value}]" for option in product.options.values() for value in option]
    assert read_actions(outcome) == [
        "click[back to search]",
        "click[< prev]",
        "click[description]",
        "click[features]",
        *values,
        "click[buy now]",
    ]
    features = env.step("click[features]")
    assert all(attribute in features[0].text for attribute in product.attributes)
    assert read_actions(features) == ["click[back to search]", "click[< prev]"]
    assert (
        product.department in (env.step("click[< prev]"), env.step("click[description]"))[1][0].text
    )
    back = env.step("click[< prev]")
    assert back[0].anchor == outcome[0].anchor
    assert "Page " in env.step("click[< prev]")[0].text


def test_anchor_depends_on_chosen_options_and_not_their_order(env, task):
    open_goal_item(env, task)
    product = make_catalogue(60)[task["goal"]["item_id"]]
    (red, blue, *_), (small, *_) = product.options["color"], product.options["size"]
    env.step(f"click[{red}]")
    with_red = env.step(f"click[{small}]")[0]
    assert f"(chosen: {red})" in with_red.text and f"(chosen: {small})" in with_red.text
    env.step("click[< prev]")
    env.step(f"click[{product.item_id}]")
    for value in (small, blue, red):
        other = env.step(f"click[{value}]")[0]
    assert other.anchor == with_red.anchor and f"(chosen: {blue})" not in other.text


def test_leaving_an_item_clears_the_chosen_options(env, task):
    outcome = open_goal_item(env, task)
    env.step(f"click[{task['goal']['options']['color']}]")
    env.step("click[< prev]")
    assert env.step(f"click[{task['goal']['item_id']}]")[0].anchor == outcome[0].anchor


def test_purchase_without_options_gets_partial_reward(env, task):
    open_goal_item(env, task)
    observation, reward, done, info = env.step("click[buy now]")
    assert (
        reward == pytest.approx(3 / 5) and done and info == {"won": False, "is_action_valid": True}
    )
    assert observation.text.startswith("You bought ")


def test_score_counts_fulfilled_wishes_and_kind():
    shop = make_catalogue(400)
    task = next(t for t in list_tasks(read({}), "train") if len(set(t["goal"]["attributes"])) == 2)
    goal, product = task["goal"], shop[task["goal"]["item_id"]]
    chosen = dict(goal["options"])
    assert score_purchase(product, chosen, goal) == 1.0
    assert score_purchase(product, {**chosen, "color": "none"}, goal) == pytest.approx(4 / 5)
    assert score_purchase(product, {}, {**goal, "max_price": product.price}) == pytest.approx(
        2 / 5
    )  # max_price must be above the price
    assert score_purchase(replace(product, attributes=()), chosen, goal) == pytest.approx(3 / 5)
    near, far = (
        replace(product, kind="tea pot"),
        replace(product, kind="tent", department="camping"),
    )
    assert score_purchase(near, chosen, goal) == pytest.approx(0.5) and score_purchase(
        far, chosen, goal
    ) == pytest.approx(0.1)
    assert score_purchase(far, {}, {**goal, "attributes": ["edible"], "max_price": 0}) == 0.0


def test_goal_is_fulfilled_by_its_product_which_a_search_finds():
    for split in ("train", "val"):
        for task in list_tasks(read({}), split)[::5]:
            goal, product = task["goal"], make_catalogue(400)[task["goal"]["item_id"]]
            assert score_purchase(product, goal["options"], goal) == 1.0
            words = f"{goal['kind']} {' '.join(goal['attributes'])} {goal['options']['color']}"
            assert product in find_products(400, words, 20)


def test_goals_of_a_product_are_in_one_split():
    train, val = list_tasks(read({}), "train"), list_tasks(read({}), "val")
    assert not {t["goal"]["item_id"] for t in train} & {t["goal"]["item_id"] for t in val}
    assert len({t["goal"]["instruction"] for t in train + val}) == len(train) + len(val)
    assert (
        list_tasks(read({"products": 100}), "val")
        == list_tasks(read({}), "val")[: len(list_tasks(read({"products": 100}), "val"))]
    )


def test_option_values_and_button_names_are_disjoint():
    for product in make_catalogue(400).values():
        colors, sizes = map(set, product.options.values())
        assert not colors & sizes and not (colors | sizes) & {"description", "features", "buy now"}
    assert len(make_catalogue(400)) == 400


def test_webshop_keys_accept_only_the_supported_value():
    assert list_tasks(read({**FEW, "use_small": True, "human_goals": False}), "val") == list_tasks(
        read(FEW), "val"
    )
    with pytest.raises(ValueError, check=mentions("env.shop.use_small=False")):
        list_tasks(read({"use_small": False}), "val")


def test_prompts_list_the_possible_actions(env, task):
    prompts = PACKAGE.prompts(read({}))
    observation = env.step("search[water bottle]")[0]
    possible = f"Possible actions: {', '.join(observation.info['admissible_actions'])}"
    assert prompts.turn(observation).endswith(possible)
    assert prompts.window(
        env.reset(task, 0), [("before", "search[x]")], observation, False
    ).endswith(possible)


def test_gold_policy_reads_the_page_and_not_the_catalogue(task):
    """The policy turns pages until the product is listed."""
    act = buy_the_goal(task)
    assert act("Possible actions: search[<words>]").startswith("search[")
    assert act("Possible actions: click[next >], click[b1]") == "click[next >]"
