"""Sokoban as an environment package: ``env.env_name=sokoban``."""

from typing import Any

from agent_system.environments.chat_prompts import (
    IMAGE_PLACEHOLDER,
    ChatPrompts,
    CompactPrompts,
)
from agent_system.environments.env import Env, Observation, Step, Task
from agent_system.environments.env_package.sokoban import levels, prompts, render
from agent_system.environments.env_package.sokoban.expert import EXPERT
from agent_system.environments.env_package.sokoban.settings import NAME, SokobanSettings
from agent_system.environments.package import EnvPackage
from verl.utils.seeds import derive_seed

RULES = """\
You are in a storeroom seen from above. Push every box onto a target. You move up, \
down, left or right, one cell per
move. Walking into a box pushes it one cell further, if the cell behind it is free; boxes cannot \
be pulled.
{legend}"""
LEGEND_BY_SHOWS_IMAGES = {
    False: "# wall, _ floor, . target, $ box, * box on a target, @ you, + you on a target",
    True: (
        "Walls are dark brown, targets red diamonds, boxes light brown, boxes on targets orange, "
        "you are green."
    ),
}


class SokobanEnv(Env):
    """Environment of Sokoban. An episode ends when every box is on a target.

    The caller limits the number of turns. A move into a wall, or into a box that cannot be pushed,
    changes nothing and is invalid. The anchor is the board as text.
    """

    placement = "inline"

    def __init__(self, settings: SokobanSettings) -> None:
        self.settings = settings

    def reset(self, task: Task, seed: int) -> Observation:
        self.room, self.state = levels.SokobanRoom.parse_level(task["level"])
        return self._make_observation("")

    def step(self, action: str) -> Step:
        action = action.strip().lower()
        states_by_move = dict(self.room.list_next_states(self.state))
        is_valid = action in states_by_move
        num_placed_before = self.room.count_placed_boxes(self.state)
        self.state = states_by_move.get(action, self.state)
        won = self.room.is_solved(self.state)
        message = "Every box is on a target.\n" if won else "" if is_valid else "Nothing moves.\n"
        reward = float(won)
        if self.settings.reward == "gym":
            num_placed_after = self.room.count_placed_boxes(self.state)
            reward = -0.1 + num_placed_after - num_placed_before + 10.0 * won
        info = {"won": won, "is_action_valid": is_valid}
        return self._make_observation(message), reward, won, info

    def _make_observation(self, message: str) -> Observation:
        level = self.room.format_level(self.state)
        info = {"admissible_actions": [move for move, _ in self.room.list_next_states(self.state)]}
        if self.settings.shows_images:
            image = render.render_image(level, self.settings.tile)
            return Observation(message + IMAGE_PLACEHOLDER, image, level, info)
        return Observation(message + render.render_text(level), anchor=level, info=info)


def make_prompts(settings: SokobanSettings) -> ChatPrompts | CompactPrompts:
    if settings.prompt == "compact":
        return CompactPrompts(prompts.describe_map, prompts.append_map_description, keep_first=True)
    return ChatPrompts(
        RULES.format(legend=LEGEND_BY_SHOWS_IMAGES[settings.shows_images]), example="up"
    )


def list_tasks(settings: SokobanSettings, split: str) -> list[Task]:
    """Return one task per level.

    The ``solution`` of a task is for demonstrations and never part of a prompt.
    """
    levels_and_solutions = levels.generate_levels(settings)[split]  # pyright: ignore[reportArgumentType]  settings are hashable
    return [
        {
            "task_id": f"{NAME}/{derive_seed(levels.canonicalize_level(level)):x}",
            "data_source": NAME,
            "level": level,
            "solution": list(solution),
        }
        for level, solution in levels_and_solutions
    ]


def find_image_setting(settings: SokobanSettings) -> tuple[str, Any, Any] | None:
    """Return (key, value, value for text observations) if observations are images, else None.

    A run that needs text observations names this setting in its error message.
    """
    return ("mode", settings.mode, "text") if settings.shows_images else None


PACKAGE = EnvPackage(
    name=NAME,
    settings=SokobanSettings,
    make=SokobanEnv,
    tasks=list_tasks,
    prompts=make_prompts,
    images=find_image_setting,
    expert=EXPERT,
)
