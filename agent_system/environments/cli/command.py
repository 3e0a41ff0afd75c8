"""The words of ``python -m agent_system.environments``."""

import argparse
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import yaml
from rich.console import Console

from agent_system.environments.cli.checking import Findings, check, returns_table
from agent_system.environments.cli.names import names_with_oracle, remarks, unlisted_names
from agent_system.environments.cli.playing import play
from agent_system.environments.env_registry import MissingExtra, UnknownEnvironment
from agent_system.environments.jvm import JavaMissing
from agent_system.environments.pool.failure import WorkerStartError

SHOWN = 80  # characters of a word that cannot be read
LARGEST = 10**6  # of a number on the command line
WIDTH = 100  # columns where no terminal says how wide it is
# Their messages are whole sentences.
REFUSED = (UnknownEnvironment, MissingExtra, WorkerStartError, JavaMissing, ValueError, OSError)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status: 0, 1 where a check found something wrong, 2 where the
    words cannot be followed.
    """
    words = _read(argv)
    try:
        if words.command == "list":
            _list(words.unlisted)
            return 0
        kwargs = read_keys(words.key)
        if words.command == "play":
            play(words.name, kwargs, words.split, words.task, words.steps)
            return 0
        return report(check(words.name, kwargs, words.split, words.tasks, words.steps))
    except REFUSED as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except Exception as error:  # packages, their files and functions may be the user's own
        sys.stderr.write(f"{_describe_error(error)}\n")
        return 2
    except KeyboardInterrupt:
        return 130


def _list(unlisted: bool) -> None:
    if unlisted:
        lines = [f"{name}\t{why}" for name, why in unlisted_names().items()]
        sys.stdout.write("\n".join(lines) + "\n")
        return
    known, names = names_with_oracle()
    marks = remarks()
    lines = [f"{name}\t{marks[name]}" if name in marks else name for name in names]
    sys.stdout.write("\n".join(lines) + "\n")
    # Not among the names: other programs read them.
    sys.stderr.write(
        f"{len(names)} names; for {len(known)} of them an oracle is known, which solves tasks for "
        f"check; {len(unlisted_names())} more can be played and are not listed: list --unlisted\n"
    )


def report(findings: Findings, console: Console | None = None) -> int:
    """Print what a check found; 0 where nothing is wrong, else 1."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(width=WIDTH, file=console.file)
    console.print(returns_table(findings))
    for sentence in findings.left_open:
        console.print(f"open: {sentence}", markup=False)
    for sentence in findings.wrong:
        console.print(f"WRONG: {sentence}", markup=False, soft_wrap=True)
    if not findings.wrong:
        best = findings.constant
        # The constant that succeeded most often, cut to what fits into the line.
        most = f"; constant {best.action[:12]!r}: {best.successes}/{best.plays}" if best else ""
        console.print(
            f"nothing is wrong; every play went the same way in another process{most}", markup=False
        )
    return 1 if findings.wrong else 0


def read_keys(words: Sequence[str]) -> dict[str, Any]:
    """``["size=5", "reward.path=f.py"]`` as the section they write. Raises ``ValueError``."""
    section: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not all(key.split(".")):
            raise ValueError(f"{word!r}: allowed: KEY=VALUE, a key of the environment's section")
        *outer, last = key.split(".")
        inner: Any = section
        for part in outer:
            inner = inner.setdefault(part, {}) if isinstance(inner, dict) else None
        if not isinstance(inner, dict) or last in inner:
            raise ValueError(
                f"{word!r}: another word sets the same key, or a key above or below it; allowed: "
                "each key once; fix: leave one of them out"
            )
        inner[last] = _read_value(word, text)
    return section


def _read_value(word: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem", None) or type(error).__name__
        raise ValueError(
            f"{word[:SHOWN]!r}: the value cannot be read: {mark}; allowed: YAML, such as 5, text, "
            "[a, b] or {a: 1}; fix: close brackets and quotes"
        ) from error


def _read(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    # argparse gives up on positional words behind an option; they are keys as well.
    words, behind = parser.parse_known_args(argv)
    if behind and (words.command == "list" or any(word.startswith("-") for word in behind)):
        parser.error(f"unrecognized arguments: {' '.join(behind)}")
    if behind:
        words.key += behind
    return words


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m agent_system.environments",
        description="The environments: their names, whether their rewards can be believed, a play.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    listed = commands.add_parser(
        "list", help="every name, one a line, with a remark behind some of them"
    )
    listed.add_argument(
        "--unlisted", action="store_true", help="instead the names that are not, and why"
    )
    checked = commands.add_parser("check", help="play it with policies that must and must not win")
    _common(checked)
    checked.add_argument(
        "--tasks", type=_positive, help="tasks that each policy plays (8; 32 of one action each)"
    )
    played = commands.add_parser("play", help="play it yourself, an action a line")
    _common(played)
    played.add_argument("--task", type=_not_negative, default=0, help="which one, from 0")
    return parser


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="a name of the list, in any case")
    parser.add_argument("key", nargs="*", help="keys of its section, such as size=5")
    parser.add_argument("--split", choices=("train", "val"), default="val", help="of which split")
    parser.add_argument(
        "--steps", type=_positive, default=50, help="actions of an episode, at most"
    )


def _positive(text: str) -> int:
    return _bounded(text, 1)


def _not_negative(text: str) -> int:
    return _bounded(text, 0)


def _bounded(text: str, least: int) -> int:
    if not text.isascii() or not text.isdecimal() or not least <= int(text) <= LARGEST:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: an integer from {least} to {LARGEST}")
    return int(text)


def _describe_error(error: BaseException) -> str:
    """Return kind, message and place of ``error`` in one line; only the message if it has a fix."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    message = " ".join(str(error).split()) or "no message"
    if "; fix: " in message:
        return message
    return f"{type(error).__name__}: {message}{place}"
