"""Policies that know the answer, for the environments that other libraries provide."""

import itertools
import re
from collections.abc import Callable
from typing import Any, Protocol

from agent_system.environments.env import Env, Task
from tests.helpers.solvability import Act, Policy, follow_script

FEEDBACK = re.compile(
    r"Submitted \[([\d ]+)\]\. Feedback: (\d) black peg\(s\), (\d) white peg\(s\)"
)


class GoldenEnv(Env, Protocol):
    """Environment that knows a solution of each task."""

    def gold_path(self, task: Task) -> list[str]: ...


def gold(env: GoldenEnv) -> Policy:
    """Return a policy that follows ``env.gold_path``, without actions that are not admissible.

    The actions are first run on ``env``. If they do not succeed there, the error is in the library
    and not in the collector.
    """

    paths_by_task: dict[str, list[str]] = {}

    def policy(task: Task) -> Act:
        if task["task_id"] not in paths_by_task:
            paths_by_task[task["task_id"]] = winning_actions(task)
        return follow_script(paths_by_task[task["task_id"]])

    def winning_actions(task: Task) -> list[str]:
        path = env.gold_path(task)
        possible = env.reset(task, 0).info.get("admissible_actions")
        actions: list[str] = []
        info: dict[str, Any] = {"won": False}
        for action in path:
            if possible is not None and action not in possible:
                continue
            actions.append(action)
            observation, _, done, info = env.step(action)
            possible = observation.info.get("admissible_actions")
            if done:
                break
        assert info["won"], f"{task['task_id']}: the library's own solution {path} has no success"
        return actions

    return policy


def halve(task: Task) -> Act:
    """Guess the middle of the remaining range."""
    low, high, last = 1, 100, 0

    def act(prompt: str) -> str:
        nonlocal low, high, last
        hints = re.findall(r"target number is (higher|lower)", prompt)
        if last:
            low, high = (last + 1, high) if hints[-1] == "higher" else (low, last - 1)
        last = (low + high) // 2
        return f"[{last}]"

    return act


def walk_around_holes(task: Task) -> Act:
    """Follow the shortest path on the board that was printed last."""

    def act(prompt: str) -> str:
        lines = [
            line
            for line in prompt.rpartition("Current Board:")[2].splitlines()
            if line.startswith("|")
        ]
        board = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        start = next(
            (r, c) for r, row in enumerate(board) for c, cell in enumerate(row) if cell == "P"
        )
        first: dict[tuple[int, int], str] = {start: ""}
        edge = [start]
        for row, column in edge:  # grows during the loop: breadth-first search
            for move, (down, right) in {
                "up": (-1, 0),
                "down": (1, 0),
                "left": (0, -1),
                "right": (0, 1),
            }.items():
                cell = row + down, column + right
                if not (0 <= cell[0] < len(board) and 0 <= cell[1] < len(board)) or cell in first:
                    continue
                if board[cell[0]][cell[1]] != "H":
                    first[cell] = first[row, column] or move
                    edge.append(cell)
        goal = next(
            (r, c) for r, row in enumerate(board) for c, cell in enumerate(row) if cell == "G"
        )
        return first[goal]

    return act


def switch_off(task: Task) -> Act:
    """Try all switches of the first row; the other rows follow from the lights above (light
    chasing).
    """
    remaining: list[str] = []

    def act(prompt: str) -> str:
        if not remaining:
            rows = re.findall(r"^\d: ([O.](?: [O.])*)", prompt, re.MULTILINE)
            remaining.extend(
                _lights_solution([[light == "O" for light in row.split()] for row in rows])
            )
        return remaining.pop(0)

    return act


def _lights_solution(grid: list[list[bool]]) -> list[str]:
    size = len(grid)
    for first in itertools.product((False, True), repeat=size):
        lights, presses = [list(row) for row in grid], []
        for row in range(size):
            for column in range(size):
                if first[column] if row == 0 else lights[row - 1][column]:
                    presses.append((row, column))
                    for r, c in ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)):
                        if 0 <= row + r < size and 0 <= column + c < size:
                            lights[row + r][column + c] ^= True
        if not any(itertools.chain(*lights)):
            return [f"{row} {column}" for row, column in presses]
    raise AssertionError(f"no solution of {grid}")


def break_the_code(task: Task) -> Act:
    """Guess the first code that agrees with all answers so far."""
    feedback_by_guess: dict[tuple[int, ...], tuple[int, int]] = {}

    def act(prompt: str) -> str:
        for code, black, white in FEEDBACK.findall(prompt):
            feedback_by_guess[tuple(map(int, code.split()))] = int(black), int(white)
        for code in itertools.permutations(range(1, 7), 4):
            if all(_pegs(code, guess) == pegs for guess, pegs in feedback_by_guess.items()):
                return f"[{' '.join(map(str, code))}]"
        raise AssertionError(f"no code fits {feedback_by_guess}")

    return act


def _pegs(code: tuple[int, ...], guess: tuple[int, ...]) -> tuple[int, int]:
    black = sum(a == b for a, b in zip(code, guess, strict=True))
    return black, len(set(code) & set(guess)) - black


TEXTARENA: dict[str, Callable[[Task], Act]] = {
    "GuessTheNumber": halve,
    "FrozenLake": walk_around_holes,
    "LightsOut": switch_off,
    "Mastermind": break_the_code,
}
