"""Interactive episode: the user types one action per line, until the episode or the input ends."""

import sys
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from agent_system.environments.cli.limits import within_limits
from agent_system.environments.cli.names import meant
from agent_system.environments.env import Env, Observation
from agent_system.environments.env_registry import (
    env_settings,
    get_package,
    missing_extra,
)
from agent_system.environments.experts.episode import now
from agent_system.environments.prompts import Prompts, prompts_for
from agent_system.environments.tasks import panel_of
from verl.config.schema.env import EnvConfig

SHOWN = 20  # maximum number of admissible actions that are printed


class NoSuchTask(ValueError):
    """Task number that is not below the number of tasks."""


def play(
    name: str,
    kwargs: Mapping[str, Any] | None = None,
    split: str = "val",
    number: int = 0,
    steps: int = 50,
    lines: TextIO | None = None,
    console: Console | None = None,
) -> bool:
    """Run task ``number`` of the validation order of ``split`` with typed actions.

    Actions are read from ``lines`` (default: standard input), which need not be a terminal. Return
    True for a success. Raises what ``check_environment`` raises, and ``NoSuchTask``.
    """
    name = meant(name)
    settings = env_settings(EnvConfig(env_name=name, kwargs=dict(kwargs or {}), max_steps=steps))
    package = get_package(name)
    try:
        with within_limits(f"listing the {split} tasks of {name}"):
            panel = panel_of(package.tasks(settings, split), number + 1)
            env = package.make(settings)
    except ModuleNotFoundError as error:
        raise missing_extra(name, error) from error
    try:
        if number >= len(panel):
            raise NoSuchTask(
                f"--task {number}: {name} has {len(panel)} {split} tasks; fix: --task 0"
            )
        task, seed = panel[number]
        console = console or Console()
        console.print(f"{task['task_id']}; end the input (Ctrl-D) to stop", style="dim")
        first = now(env.reset(task, seed))
        _introduce(console, prompts_for(package.prompts(settings), first), first)
        return _played(env, first, _typed(lines or sys.stdin, console), console, steps)
    finally:
        env.close()


def _introduce(console: Console, prompts: Prompts, first: Observation) -> None:
    system = prompts.system(False)
    if system:
        console.print(Text(system, style="dim"))
    for message in first.opening:
        console.print(Text(f"{message['role']}: {message['content']}", style="dim"))


def _typed(lines: TextIO, console: Console) -> Iterator[str]:
    """Yield the lines of the input. Print a prompt before each."""
    while True:
        console.print("> ", end="", style="bold")
        line = lines.readline()
        if not line:
            console.print()
            return
        # A pipe does not echo its input, so print it.
        if not lines.isatty():
            console.print(Text(line.rstrip("\n")))
        yield line.strip()


def _played(
    env: Env, first: Observation, actions: Iterator[str], console: Console, steps: int
) -> bool:
    observation, earned = first, 0.0
    for number in range(1, steps + 1):
        _show(console, observation)
        action = next(actions, None)
        if action is None:
            console.print(f"stopped after {number - 1} actions; return {earned:g}")
            return False
        observation, reward, done, info = now(env.step(action))
        earned += reward
        if not info.get("is_action_valid", True):
            console.print("this action is not valid here", style="yellow")
        if done:
            _show(console, observation, over=True)
            won = bool(info.get("won"))
            outcome = "success" if won else "no success"
            console.print(f"{outcome} after {number} actions; return {earned:g}")
            return won
    console.print(f"ended after {steps} actions, no success; return {earned:g}")
    return False


def _show(console: Console, observation: Observation, over: bool = False) -> None:
    # Print as text: rich would read square brackets as markup.
    console.print(Text(observation.text))
    possible = [] if over else list(observation.info.get("admissible_actions") or ())
    if possible:
        more = f" and {len(possible) - SHOWN} more" if len(possible) > SHOWN else ""
        console.print(Text(f"valid actions: {', '.join(possible[:SHOWN])}{more}", style="dim"))
