"""Arguments and output of ``python -m agent_system.environments``."""

import argparse
import functools
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import yaml
from rich.console import Console

from agent_system.environments.cli.checking import (
    CheckFindings,
    build_results_table,
    check_environment,
)
from agent_system.environments.cli.interactive import run_interactive
from agent_system.environments.cli.names import (
    collect_name_remarks,
    collect_unlisted_names,
    list_names_with_oracle,
)
from agent_system.environments.env import WorkerStartError
from agent_system.environments.env_registry import MissingExtraError, UnknownEnvironmentError
from verl.config.settings.errors import names_fix
from verl.config.yaml_files import parse_yaml
from verl.utils.limits import USER_CODE_ERRORS, describe_error
from verl.utils.logging import escape_control_characters

MAX_SHOWN_CHARS = 80  # characters of an invalid argument in a message
MAX_INTEGER_OPTION = 10**6  # largest value of an integer option on the command line
OUTPUT_COLUMNS = 100  # columns of the output without a terminal
# Errors caused by the user's input. They are printed without type and traceback.
USER_ERRORS = (UnknownEnvironmentError, MissingExtraError, WorkerStartError, ValueError, OSError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status.

    The status is 0 for success, 1 if a check found problems, 2 for invalid arguments and errors.
    """
    arguments = _parse_arguments(argv)
    try:
        if arguments.command == "list":
            _print_names(arguments.unlisted)
            return 0
        name, kwargs, split = arguments.name, parse_config_overrides(arguments.key), arguments.split
        if arguments.command == "play":
            run_interactive(name, kwargs, split, arguments.task, arguments.steps)
            return 0
        return print_findings(
            check_environment(name, kwargs, split, arguments.tasks, arguments.steps)
        )
    except USER_ERRORS as error:
        sys.stderr.write(f"{escape_control_characters(str(error))}\n")
        return 2
    except USER_CODE_ERRORS as error:  # boundary to user code
        sys.stderr.write(f"{escape_control_characters(_describe_error(error))}\n")
        return 2
    except KeyboardInterrupt:
        return 130


def _print_names(shows_unlisted: bool) -> None:
    if shows_unlisted:
        lines = [f"{name}\t{reason}" for name, reason in collect_unlisted_names().items()]
        sys.stdout.write("\n".join(lines) + "\n")
        return
    oracle_names, names = list_names_with_oracle()
    remarks = collect_name_remarks()
    lines = [f"{name}\t{remarks[name]}" if name in remarks else name for name in names]
    sys.stdout.write("\n".join(lines) + "\n")
    # The summary goes to stderr, because other programs read the names from stdout.
    sys.stderr.write(
        f"{len(names)} names; {len(oracle_names)} of them have an oracle, which solves tasks for "
        f"check; list --unlisted prints {len(collect_unlisted_names())} more names\n"
    )


def print_findings(findings: CheckFindings, console: Console | None = None) -> int:
    """Print the result of a check. Return 0 if there are no problems, else 1."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(width=OUTPUT_COLUMNS, file=console.file)
    console.print(build_results_table(findings))
    for sentence in findings.open_questions:
        _print_sentence(console, f"open: {sentence}")
    for sentence in findings.problems:
        _print_sentence(console, f"WRONG: {sentence}")
    if not findings.problems:
        summary = "nothing is wrong; repeated episodes gave the same transcripts"
        if findings.constant:
            # Cut the action so that the message fits into the line.
            constant_result = findings.constant
            success_ratio = f"{constant_result.num_successes}/{constant_result.num_episodes}"
            summary += f"; constant {constant_result.action[:12]!r}: {success_ratio}"
        console.print(summary, markup=False)
    return 1 if findings.problems else 0


def _print_sentence(console: Console, sentence: str) -> None:
    console.print(escape_control_characters(sentence), markup=False, soft_wrap=True)


def parse_config_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the config section that consists of ``KEY=VALUE`` arguments. Raises ``ValueError``.

    Example: ``["size=5", "reward.path=f.py"]`` gives ``{"size": 5, "reward": {"path": "f.py"}}``.
    """
    section: dict[str, Any] = {}
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not all(key.split(".")):
            raise ValueError(
                f"{override!r}: allowed: KEY=VALUE, a key of the environment's section"
            )
        *section_names, leaf_key = key.split(".")
        subsection: Any = section
        for section_name in section_names:
            if isinstance(subsection, dict):
                subsection = subsection.setdefault(section_name, {})
        if not isinstance(subsection, dict) or leaf_key in subsection:
            raise ValueError(
                f"{override!r}: another argument sets the same key, or a key above or below it; "
                "allowed: each key once; fix: remove one of them"
            )
        subsection[leaf_key] = _parse_override_value(override, text)
    return section


def _parse_override_value(override: str, text: str) -> Any:
    try:
        return parse_yaml(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        reason = getattr(error, "problem", None) or type(error).__name__
        raise ValueError(
            f"{override[:MAX_SHOWN_CHARS]!r}: the value cannot be read: {reason}; allowed: YAML, "
            "such as 5, text, [a, b] or {a: 1}; fix: close brackets and quotes"
        ) from error


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _build_parser()
    # argparse does not read positional arguments (``key=value``) after an option. Add them here.
    arguments, extra_arguments = parser.parse_known_args(argv)
    if extra_arguments and (
        arguments.command == "list" or any(argument.startswith("-") for argument in extra_arguments)
    ):
        parser.error(f"unrecognized arguments: {' '.join(extra_arguments)}")
    if extra_arguments:
        arguments.key += extra_arguments
    return arguments


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m agent_system.environments",
        description="List environments, check their rewards, or run an episode by hand.",
    )
    subparsers = parser.add_subparsers(dest="command", required=True)
    list_parser = subparsers.add_parser(
        "list", help="print all names, one per line, some of them with a remark"
    )
    list_parser.add_argument(
        "--unlisted",
        action="store_true",
        help="print the names that are not listed, with the reason",
    )
    check_parser = subparsers.add_parser(
        "check", help="check the rewards with policies that must or must not succeed"
    )
    _add_common_arguments(check_parser)
    check_parser.add_argument(
        "--tasks",
        type=_read_integer,
        help="tasks of each policy (default: 8, or 32 if episodes have one turn)",
    )
    interactive_parser = subparsers.add_parser(
        "play", help="run an episode with actions that you type, one per line"
    )
    _add_common_arguments(interactive_parser)
    read_task_number = functools.partial(_read_integer, minimum=0)
    interactive_parser.add_argument(
        "--task", type=read_task_number, default=0, help="number of the task"
    )
    return parser


def _add_common_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="name of the environment, in upper or lower case")
    parser.add_argument("key", nargs="*", help="keys of its config section, such as size=5")
    parser.add_argument("--split", choices=("train", "val"), default="val", help="split of tasks")
    parser.add_argument(
        "--steps", type=_read_integer, default=50, help="maximum number of actions of an episode"
    )


def _read_integer(text: str, minimum: int = 1) -> int:
    if not text.isascii() or not text.isdecimal() or not minimum <= int(text) <= MAX_INTEGER_OPTION:
        raise argparse.ArgumentTypeError(
            f"{text!r}; allowed: an integer from {minimum} to {MAX_INTEGER_OPTION}"
        )
    return int(text)


def _describe_error(error: BaseException) -> str:
    """Return type, message and source line of ``error``; only the message if it contains a fix."""
    stack_frames = traceback.extract_tb(error.__traceback__)
    location = f" ({stack_frames[-1].filename}:{stack_frames[-1].lineno})" if stack_frames else ""
    message = " ".join(describe_error(error, str).split()) or "no message"
    if names_fix(message):
        return message
    return f"{type(error).__name__}: {message}{location}"
