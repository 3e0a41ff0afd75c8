"""Sample episodes of a report: which ones, and their turns in the form the page shows."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.record.report.run_data import RunData
from verl.sections import AlternativesView, NumberColumn, StepView, contributions
from verl.utils import jsonl

MAX_LINES = 4000  # rows read of one rollout file
MAX_TURNS = 60


@dataclass
class EpisodeView:
    """One trajectory: the rows that belong to it, merged, with its turns in order."""

    title: str
    row: dict[str, Any]
    steps: list[dict[str, Any]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Sampled tokens of all turns."""
        return sum(step.get("num_tokens") or 0 for step in self.steps)

    @property
    def has_credit(self) -> bool:
        """Whether the tokens carry advantages."""
        return any("token_credit" in step for step in self.steps)

    @property
    def scale(self) -> float:
        """The advantage (absolute) at which colours are full: 95% of the tokens lie below it."""
        # Not the largest one: a single outlier would leave all other tokens without colour.
        sizes = sorted(
            abs(value or 0.0) for step in self.steps for _, value in step.get("token_credit", [])
        )
        return max(sizes[int(0.95 * (len(sizes) - 1))], 1e-9) if sizes else 1.0

    def turns(self) -> list[dict[str, Any]]:
        """The steps with what the template needs beside the record.

        ``tokens`` have the strength of their credit; ``badges``, ``flags`` and ``tables`` are what
        ``step_views`` ask for.
        """
        scale = self.scale
        views = step_views()
        return [_turn(step, scale, views) for step in self.steps[:MAX_TURNS]]


@dataclass(frozen=True)
class Cell:
    """A number of a table, as text."""

    text: str
    best: bool


@dataclass(frozen=True)
class AlternativeLine:
    """One alternative: its number, what would have stood there, whether it did."""

    number: int
    text: str
    chosen: bool
    cells: list[Cell]


@dataclass(frozen=True)
class AlternativesTable:
    """The alternatives of one step, as ``view`` declares them."""

    view: AlternativesView
    lines: list[AlternativeLine]
    note: str


def step_views() -> list[StepView]:
    """What methods and environments want to see of every step."""
    return [other.steps for other in contributions() if other.steps is not None]


def _turn(step: dict[str, Any], scale: float, views: Sequence[StepView]) -> dict[str, Any]:
    badges = [step[view.badge] for view in views if view.badge and step.get(view.badge)]
    flags = [step[flag] for view in views for flag in view.flags if step.get(flag)]
    asked = [view.alternatives for view in views if view.alternatives is not None]
    tables = [_table(step, view) for view in asked if step.get(view.key)]
    return {
        **step,
        "tokens": _tokens(step, scale),
        "badges": badges,
        "flags": flags,
        "tables": tables,
    }


def _tokens(step: dict[str, Any], scale: float) -> list[dict[str, Any]]:
    """Text, credit and strength of the credit, in [-1, 1], of every sampled token."""
    tokens = []
    for text, credit in step.get("token_credit", []):
        value = credit or 0.0  # null in the file where it was not finite
        strength = math.copysign(min(1.0, abs(value) / scale), value)
        tokens.append({"text": text, "value": value, "strength": round(strength, 2)})
    return tokens


def _table(step: dict[str, Any], view: AlternativesView) -> AlternativesTable:
    entries = sorted(step[view.key], key=lambda entry: entry[view.badge])
    columns = [_cells(entries, column) for column in view.columns]
    lines = []
    for index, entry in enumerate(entries):
        cells = [column[index] for column in columns]
        lines.append(
            AlternativeLine(entry[view.badge], entry[view.text], bool(entry[view.chosen]), cells)
        )
    key, sentence = view.note
    note = sentence.format(step[key]) if step.get(key) is not None else ""
    return AlternativesTable(view, lines, note)


def _cells(entries: Sequence[dict[str, Any]], column: NumberColumn) -> list[Cell]:
    """One cell per entry; empty where it has no such number."""
    values = [entry.get(column.key) for entry in entries]
    known = [value for value in values if value is not None]
    # The largest of a single number says nothing.
    best = max(known) if column.best and len(known) > 1 else None
    cells = []
    for value in values:
        text = "" if value is None else column.form.format(value)
        cells.append(Cell(text, best is not None and value == best))
    return cells


def read_trajectories(path: Path) -> list[dict[str, Any]]:
    """The trajectories of a rollout file: rows of the same ``traj_uid`` are merged, steps in
    order.
    """
    merged: dict[str, dict[str, Any]] = {}
    for count, line in enumerate(jsonl.read(path)):
        if count >= MAX_LINES:
            break
        known = merged.setdefault(str(line.get("traj_uid", count)), {**line, "steps": []})
        known["steps"] = known["steps"] + list(line.get("steps") or [])
    for trajectory in merged.values():
        trajectory["steps"].sort(key=lambda step: step.get("step", 0))
    return list(merged.values())


def sample_episodes(run: RunData) -> list[EpisodeView]:
    """A won and a lost play of the same task from the last training step, one early episode, two
    held-out ones.
    """
    chosen: list[EpisodeView] = []
    train = run.rollout_steps()
    val = run.rollout_steps(validation=True)
    if train:
        last = read_trajectories(run.directory.rollout_path(train[-1]))
        chosen += [_episode(f"training step {train[-1]}", row) for row in contrasting(last)]
    if val:
        held_out = read_trajectories(run.directory.rollout_path(val[-1], validation=True))
        chosen += [_episode(f"held-out, step {val[-1]}", row) for row in one_of_each(held_out)]
    if len(train) > 1:
        early = one_of_each(read_trajectories(run.directory.rollout_path(train[0])))
        chosen += [_episode(f"training step {train[0]}", row) for row in early[:1]]
    return chosen


def _episode(title: str, row: dict[str, Any]) -> EpisodeView:
    return EpisodeView(title, row, row["steps"])


def contrasting(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A won and a lost row of the same group where there is one, any of each otherwise; short ones
    first.
    """
    groups = defaultdict(list)
    for row in sorted(rows, key=lambda row: len(row["steps"])):
        groups[row.get("uid")].append(row)
    for members in groups.values():
        if len({bool(row.get("won")) for row in members}) == 2:
            return one_of_each(members)
    return one_of_each(rows)


def one_of_each(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first won and the first lost row that have steps."""
    usable = [row for row in rows if row["steps"] and not row.get("aborted")]
    won = [row for row in usable if row.get("won")]
    lost = [row for row in usable if not row.get("won")]
    return [*won[:1], *lost[:1]]
