"""Shop environment: buy the product of the instruction with WebShop's two actions."""

import re
from typing import Any

from agent_system.environments.chat_prompts import ChatPrompts
from agent_system.environments.env import Env, Observation, Step, Task
from agent_system.environments.env_package.shop import catalogue
from agent_system.environments.env_package.shop.pages import BUY_BUTTON, NEXT_BUTTON, Page
from agent_system.environments.env_package.shop.settings import ShopSettings
from agent_system.environments.package import EnvPackage
from agent_system.reward_manager.scores import is_full_score
from verl.utils.seeds import derive_seed

NAME = "shop"
RULES = """\
You shop online. Buy the product that the instruction asks for: its kind, its attributes, its \
options, its price.
On the search page you write search[words]; on every other page you write click[something], \
where something is what the
page lets you click. Click the options you want before you click[buy now], which ends the game. \
Some attributes are
only listed under click[features]."""
ACTION_PATTERN = re.compile(r"(search|click)\s*\[(.*)\]", re.DOTALL | re.IGNORECASE)
VAL_DIVISOR = 5  # goals of one product in five belong to the validation split


class ShopEnv(Env):
    """Environment whose reward is given for a purchase, which ends the episode.

    The reward is from 0 to 1 (``catalogue.score_purchase``). A reward of 1.0 is a success. An
    action that is not possible on a page changes nothing and is not valid. The caller limits the
    turns.
    """

    placement = "inline"

    def __init__(self, settings: ShopSettings) -> None:
        self.settings = settings
        self._goal: dict[str, Any] = {}
        self._page = Page()

    def reset(self, task: Task, seed: int) -> Observation:
        self._goal = task["goal"]
        self._page = Page(page_size=self.settings.page_size)
        return self._make_observation()

    def step(self, action: str) -> Step:
        match = ACTION_PATTERN.fullmatch(action.strip())
        verb, target = match.groups() if match else ("", "")
        verb, target = verb.lower(), " ".join(target.lower().split())
        if (
            verb == "click"
            and target == BUY_BUTTON
            and BUY_BUTTON in self._page.list_click_targets()
        ):
            product = self._page.current_product
            reward = catalogue.score_purchase(product, dict(self._page.chosen_options), self._goal)
            state_key = f"{self._make_state_key()} | bought"
            observation = Observation(f"You bought {product.title}.", anchor=state_key)
            info = {"won": is_full_score(reward), "is_action_valid": True}
            return observation, reward, True, info
        is_valid = self._open_page(verb, target)
        message = "" if is_valid else "That cannot be done on this page.\n"
        observation = self._make_observation(message)
        return observation, 0.0, False, {"won": False, "is_action_valid": is_valid}

    def gold_path(self, task: Task) -> list[str]:
        """Return actions that solve ``task``, or none if no search finds the product."""
        goal = task["goal"]
        query = f"{goal['kind']} {' '.join(goal['attributes'])} {goal['options']['color']}"
        products = catalogue.find_products(self.settings.products, query, self.settings.results)
        product_ids = [product.item_id for product in products]
        if goal["item_id"] not in product_ids:
            return []
        next_clicks = product_ids.index(goal["item_id"]) // self.settings.page_size
        click_targets = [
            *[NEXT_BUTTON] * next_clicks,
            goal["item_id"],
            *goal["options"].values(),
            BUY_BUTTON,
        ]
        return [f"search[{query}]", *(f"click[{target}]" for target in click_targets)]

    def _open_page(self, verb: str, target: str) -> bool:
        """Open the page that the action leads to. Return False if the action is impossible."""
        if verb == "click" and target in self._page.list_click_targets():
            self._page = self._page.click_target(target)
        elif verb == "search" and target and self._page.name == "home":
            results = tuple(
                catalogue.find_products(self.settings.products, target, self.settings.results)
            )
            self._page = Page("results", target, results, self.settings.page_size)
        else:
            return False
        return True

    def _make_state_key(self) -> str:
        return f"{self._goal['instruction']} | {self._page.build_page_id()}"

    def _make_observation(self, message: str = "") -> Observation:
        text = f"{message}Instruction: {self._goal['instruction']}\n{self._page.format_text()}"
        click_actions = [f"click[{target}]" for target in self._page.list_click_targets()]
        info = {"admissible_actions": click_actions or ["search[<words>]"]}
        return Observation(text, anchor=self._make_state_key(), info=info)


def list_tasks(settings: ShopSettings, split: str) -> list[Task]:
    """Return one task per distinct goal. Goals of one product in five belong to validation."""
    goals_by_instruction: dict[str, tuple[str, dict[str, Any]]] = {}
    for product in catalogue.make_catalogue(settings.products).values():
        for goal_index in range(settings.goals_per_product):
            goal = catalogue.make_goal(product, goal_index)
            goals_by_instruction.setdefault(
                goal["instruction"], (f"{NAME}/{product.item_id}-{goal_index}", goal)
            )
    return [
        {"task_id": task_id, "data_source": NAME, "goal": goal}
        for task_id, goal in goals_by_instruction.values()
        if (derive_seed(NAME, goal["item_id"]) % VAL_DIVISOR == 0) == (split == "val")
    ]


PACKAGE = EnvPackage(
    name=NAME,
    settings=ShopSettings,
    make=ShopEnv,
    tasks=list_tasks,
    prompts=lambda _settings: ChatPrompts(
        RULES, example="search[blue rain jacket]", list_actions=True
    ),
)
