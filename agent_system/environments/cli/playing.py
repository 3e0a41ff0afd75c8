"""A person plays: an action a line, until the episode is over or the input ends."""

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

SHOWN = 20  # possible actions that are listed


class NoSuchTask(ValueError):
    """The environment has fewer tasks than the number that was asked for."""


def play(
    name: str,
    kwargs: Mapping[str, Any] | None = None,
    split: str = "val",
    number: int = 0,
    steps: int = 50,
    lines: TextIO | None = None,
    console: Console | None = None,
) -> bool:
    """Let a person play task ``number`` of the panel of ``split``; whether it was won.

    Actions are read from ``lines`` (standard input), also where that is no terminal. Raises what
    ``check`` raises, and ``NoSuchTask``.
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
        console.print(f"{task['task_id']}; the end of the input (Ctrl-D) leaves", style="dim")
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
    """The lines that are typed, after a prompt each."""
    while True:
        console.print("> ", end="", style="bold")
        line = lines.readline()
        if not line:
            console.print()
            return
        # Without a terminal nobody sees what was typed.
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
            console.print(f"left after {number - 1} actions; return {earned:g}")
            return False
        observation, reward, done, info = now(env.step(action))
        earned += reward
        if not info.get("is_action_valid", True):
            console.print("that is not possible here", style="yellow")
        if done:
            _show(console, observation, over=True)
            won = bool(info.get("won"))
            console.print(f"{'won' if won else 'lost'} after {number} actions; return {earned:g}")
            return won
    console.print(f"over after {steps} actions, not won; return {earned:g}")
    return False


def _show(console: Console, observation: Observation, over: bool = False) -> None:
    # As text: rich would read square brackets as markup.
    console.print(Text(observation.text))
    possible = [] if over else list(observation.info.get("admissible_actions") or ())
    if possible:
        more = f" and {len(possible) - SHOWN} more" if len(possible) > SHOWN else ""
        console.print(Text(f"possible: {', '.join(possible[:SHOWN])}{more}", style="dim"))
