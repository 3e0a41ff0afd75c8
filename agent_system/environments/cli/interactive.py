"""Interactive episode: the user types one action per line, until the episode or the input ends."""

import sys
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from agent_system.environments.cli.limits import limit_time_and_memory
from agent_system.environments.cli.names import resolve_name
from agent_system.environments.env import Env, Observation, select_prompts
from agent_system.environments.env_registry import get_package, read_env_settings
from agent_system.environments.event_loop import await_if_needed
from agent_system.environments.manager import load_tasks
from agent_system.environments.tasks import select_validation_set
from verl.config.schema.env import EnvConfig
from verl.utils.logging import escape_control_characters

MAX_SHOWN_ACTIONS = 20  # maximum number of admissible actions that are printed


class NoSuchTaskError(ValueError):
    """Error for a task number that is not less than the number of tasks."""


def run_interactive(
    name: str,
    kwargs: Mapping[str, Any] | None = None,
    split: str = "val",
    task_number: int = 0,
    max_steps: int = 50,
    lines: TextIO | None = None,
    console: Console | None = None,
) -> bool:
    """Run an episode of task ``task_number`` (from 0) of ``split``. A user types the actions.

    The tasks are numbered in the order in which validation selects them. Actions are read from
    ``lines`` (default: standard input). Return True for a success.

    Raises ``NoSuchTaskError`` and the errors of ``check_environment``.
    """
    name = resolve_name(name)
    settings = read_env_settings(
        EnvConfig(env_name=name, kwargs=dict(kwargs or {}), max_steps=max_steps)
    )
    package = get_package(name)
    with limit_time_and_memory(name, f"listing the {split} tasks of {name}"):
        tasks = select_validation_set(load_tasks(name, package, settings, split), task_number + 1)
        env = package.make(settings)
    try:
        if task_number >= len(tasks):
            raise NoSuchTaskError(
                f"--task {task_number}: {name} has {len(tasks)} {split} tasks; fix: --task 0"
            )
        task, seed = tasks[task_number]
        console = console or Console()
        _print_text(console, f"{task['task_id']}; end the input (Ctrl-D) to stop", style="dim")
        first_observation = await_if_needed(env.reset(task, seed))
        prompts = select_prompts(package.prompts(settings), first_observation)
        system_message = prompts.system(False)
        if system_message:
            _print_text(console, system_message, style="dim")
        for message in first_observation.opening:
            _print_text(console, f"{message['role']}: {message['content']}", style="dim")
        actions = _read_actions(lines or sys.stdin, console)
        return _run_typed_episode(env, first_observation, actions, console, max_steps)
    finally:
        env.close()


def _read_actions(lines: TextIO, console: Console) -> Iterator[str]:
    """Yield the lines of the input. Print a prompt before each."""
    while True:
        console.print("> ", end="", style="bold")
        line = lines.readline()
        if not line:
            console.print()
            return
        # A pipe does not echo its input, so print it.
        if not lines.isatty():
            _print_text(console, line.rstrip("\n"))
        yield line.strip()


def _run_typed_episode(
    env: Env,
    first_observation: Observation,
    actions: Iterator[str],
    console: Console,
    max_steps: int,
) -> bool:
    observation, total_reward = first_observation, 0.0
    for num_actions in range(1, max_steps + 1):
        _print_observation(console, observation)
        action = next(actions, None)
        if action is None:
            console.print(f"stopped after {num_actions - 1} actions; return {total_reward:g}")
            return False
        observation, reward, done, info = await_if_needed(env.step(action))
        total_reward += reward
        if not info.get("is_action_valid", True):
            console.print("this action is not valid here", style="yellow")
        if done:
            _print_observation(console, observation, is_over=True)
            is_success = bool(info.get("won"))
            outcome_text = "success" if is_success else "no success"
            console.print(f"{outcome_text} after {num_actions} actions; return {total_reward:g}")
            return is_success
    console.print(f"ended after {max_steps} actions, no success; return {total_reward:g}")
    return False


def _print_observation(console: Console, observation: Observation, is_over: bool = False) -> None:
    _print_text(console, observation.text)
    admissible_actions = [] if is_over else list(observation.info.get("admissible_actions") or ())
    if admissible_actions:
        num_hidden = len(admissible_actions) - MAX_SHOWN_ACTIONS
        hidden_remark = f" and {num_hidden} more" if num_hidden > 0 else ""
        actions_line = (
            f"valid actions: {', '.join(admissible_actions[:MAX_SHOWN_ACTIONS])}{hidden_remark}"
        )
        _print_text(console, actions_line, style="dim")


def _print_text(console: Console, text: str, style: str = "") -> None:
    # Print as text: rich would read square brackets as markup.
    console.print(Text(escape_control_characters(text), style=style))
