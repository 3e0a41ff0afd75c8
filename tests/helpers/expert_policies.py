"""Policies that know the answer, for the environments of this repository.

``GOLD[env_name](task)`` returns the policy of one task.
"""

from agent_system.environments.env import Task
from agent_system.environments.env_package.exam.questions import (
    load_questions_by_generator,
    load_task_questions,
)
from agent_system.environments.env_package.exam.settings import ExamSettings
from agent_system.environments.env_package.recall.package import find_answer
from agent_system.environments.env_package.relay.doors import DoorPuzzle
from tests.helpers.solvability import Act, follow_script

MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}


def cross_the_lake(task: Task) -> Act:
    """Follow the shortest path over ice that is not slippery."""
    rows = task["map"]
    paths: dict[tuple[int, int], list[str]] = {(0, 0): []}
    frontier = [(0, 0)]
    for row, column in frontier:  # grows during the loop: breadth-first search
        for move, (down, right) in MOVES.items():
            cell = row + down, column + right
            inside = 0 <= cell[0] < len(rows) and 0 <= cell[1] < len(rows)
            if inside and cell not in paths and rows[cell[0]][cell[1]] != "H":
                paths[cell] = [*paths[row, column], move]
                frontier.append(cell)
    return follow_script(paths[len(rows) - 1, len(rows) - 1])


def push_the_boxes(task: Task) -> Act:
    """Follow the solution from which the level was made."""
    return follow_script(task["solution"])


def look_it_up(task: Task) -> Act:
    """Search for every title that leads to the answer, and answer when the answer was shown."""
    searches = iter(task["support"])

    def act(prompt: str) -> str:
        title = next(searches, None)
        if title is not None:
            return f"search[{title}]"
        assert task["answers"][0] in prompt, (
            f"{task['question']}: the answer was not among what was found"
        )
        return f"answer[{task['answers'][0]}]"

    return act


def buy_the_goal(task: Task) -> Act:
    """Search for the wanted product, turn result pages until it appears, choose its options and buy
    it.
    """
    goal = task["goal"]
    options = iter(goal["options"].values())
    words = f"{goal['kind']} {' '.join(goal['attributes'])} {goal['options']['color']}"

    def act(prompt: str) -> str:
        possible = prompt.rpartition("Possible actions: ")[2]
        if "search[" in possible:
            return f"search[{words}]"
        if f"click[{goal['item_id']}]" in possible:
            return f"click[{goal['item_id']}]"
        if "click[next >]" in possible:
            return "click[next >]"
        return f"click[{next(options, 'buy now')}]"

    return act


def pass_the_doors(task: Task) -> Act:
    """Say the place that opens each door."""
    return follow_script(DoorPuzzle.parse(text).answer_place for text in task["doors"])


def answer_the_questions(task: Task) -> Act:
    """Say the library's own answer to each question."""
    return follow_script(
        entry["answer"]
        for entry in load_task_questions(load_questions_by_generator(ExamSettings()), task)
    )


def turn_the_pages(task: Task) -> Act:
    """Turn all pages, then tell the place."""
    return follow_script([*["."] * (len(task["pages"]) + 1), find_answer(task)])


GOLD = {
    "exam": answer_the_questions,
    "frozen_lake": cross_the_lake,
    "recall": turn_the_pages,
    "relay": pass_the_doors,
    "search": look_it_up,
    "shop": buy_the_goal,
    "sokoban": push_the_boxes,
}
