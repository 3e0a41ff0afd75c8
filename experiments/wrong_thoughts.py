"""Count wrong thoughts of a run on relay, and average the credit that they get.

In relay a turn is a puzzle with arrows between places (``a>b``): follow a given number of them from
the current place. A score that is computed from the policy's own probabilities could reward wrong
thoughts. The table shows how much credit they get.

    python experiments/wrong_thoughts.py runs/relay/trap --steps 1-3
    python experiments/wrong_thoughts.py runs/relay/trap --steps 1,5,10,100

The table has a line per level, right or wrong thought, and right or wrong action. A thought is
right if each of its steps follows the arrows from the current place. The columns are the number of
turns, their share of the level's turns, and two means. These are the thinking advantage
(``think_advantage``, in standard deviations), and the entropy of the action's tokens (nats). Both
are empty if the run did not score the thoughts. Turns without a level are not counted.
"""

import argparse
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from agent_system.environments.env_package.relay.doors import parse_door
from verl.utils import jsonl
from verl.utils.commands import run_and_report_mistakes

ARROW_STEP_PATTERN = re.compile(r"\d+=(\w)")


@dataclass(frozen=True, slots=True, order=True)
class TurnKind:
    """Kind of a turn: level, and whether the thought and the action are right."""

    level: int
    is_thought_right: bool
    is_action_right: bool


@dataclass(frozen=True, slots=True)
class ClassifiedTurn:
    """Kind of a turn, with the numbers of its thought; None if the run did not score it."""

    kind: TurnKind
    think_advantage: float | None
    entropy: float | None


def classify_turn(step: dict[str, Any]) -> ClassifiedTurn:
    """Classify a stored turn of a trajectory."""
    state = parse_door(step["observation"])
    visited_places = ARROW_STEP_PATTERN.findall(step["response"].partition("</think>")[0])
    is_thought_right = visited_places == state.follow_arrows(state.place, len(visited_places))
    sampled_contexts = [context for context in step.get("contexts") or () if context["original"]]
    return ClassifiedTurn(
        TurnKind(step["level"], is_thought_right, step["action"] == state.answer_place),
        step.get("think_advantage"),
        sampled_contexts[0]["score_entropy"] if sampled_contexts else None,
    )


def format_turn_kind_table(turns: Iterable[ClassifiedTurn]) -> str:
    """Return a Markdown table with a line per kind of turn."""
    turns_by_kind: dict[TurnKind, list[ClassifiedTurn]] = defaultdict(list)
    for turn in turns:
        turns_by_kind[turn.kind].append(turn)
    num_turns_by_level: dict[int, int] = defaultdict(int)
    for kind, turns_of_kind in turns_by_kind.items():
        num_turns_by_level[kind.level] += len(turns_of_kind)
    lines = ["| level | thought | action | steps | share | A_think | entropy |", "|---" * 7 + "|"]
    verdicts = {True: "right", False: "wrong"}
    for kind in sorted(
        turns_by_kind, key=lambda kind: (kind.level, -kind.is_thought_right, -kind.is_action_right)
    ):
        turns_of_kind = turns_by_kind[kind]
        cells = [str(kind.level), verdicts[kind.is_thought_right], verdicts[kind.is_action_right]]
        cells += [
            str(len(turns_of_kind)),
            f"{len(turns_of_kind) / num_turns_by_level[kind.level]:.3f}",
        ]
        cells += [_mean(turn.think_advantage for turn in turns_of_kind)]
        cells += [_mean(turn.entropy for turn in turns_of_kind)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _mean(values: Iterable[float | None]) -> str:
    present_values = [value for value in values if value is not None]
    return f"{statistics.fmean(present_values):+.2f}" if present_values else ""


def parse_step_numbers(text: str) -> list[int]:
    """Parse "1-3,10" to [1, 2, 3, 10]. Raises ``ValueError`` for invalid text."""
    step_numbers: list[int] = []
    for part in text.split(","):
        first_step, dash, last_step = part.partition("-")
        step_numbers += range(int(first_step), int(last_step if dash else first_step) + 1)
    return step_numbers


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", type=Path, help="run directory of a run on relay")
    parser.add_argument(
        "--steps", type=parse_step_numbers, default=[1], help="training steps: 1-3 or 1,5,10"
    )
    args = parser.parse_args(argv)
    files = [args.run_dir / "rollouts" / f"{step}.jsonl" for step in args.steps]
    missing_files = [str(file) for file in files if not file.is_file()]
    if missing_files:
        raise SystemExit(
            f"--steps: there are no trajectories of these steps: {', '.join(missing_files)}"
        )
    rows = (row for file in files for row in jsonl.read(file))
    stored_turns = (step for row in rows for step in row["steps"])
    sys.stdout.write(
        format_turn_kind_table(
            classify_turn(step) for step in stored_turns if step["level"] is not None
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(run_and_report_mistakes(main))
