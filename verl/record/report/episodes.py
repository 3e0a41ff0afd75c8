"""Plays as the page and the terminal show them: rows joined to trajectories, steps with badges,
flags, tables and the credit of their tokens.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from verl.report_sections import AlternativesView, NumberColumn, StepView, contributions
from verl.utils import jsonl

Earned = Mapping[int, Sequence[float]]  # number of an alternative -> returns
EARNED = NumberColumn(
    "earned",
    "went on to earn",
    "{:.2f}",
    "mean return of the plays that went on from this step with it",
    best=True,
)


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
        """The steps; their ``tokens`` have the strength of their credit."""
        scale = self.scale
        return [{**step, "tokens": _tokens(step, scale)} for step in self.steps]


def _tokens(step: Mapping[str, Any], scale: float) -> list[dict[str, Any]]:
    """Text, credit and strength of the credit, in [-1, 1], of every sampled token."""
    tokens = []
    for text, credit in step.get("token_credit", []):
        value = credit or 0.0  # null in the file where it was not finite
        strength = math.copysign(min(1.0, abs(value) / scale), value)
        tokens.append({"text": text, "value": value, "strength": round(strength, 2)})
    return tokens


def step_views() -> list[StepView]:
    """What methods and environments want to see of every step."""
    return [other.steps for other in contributions() if other.steps is not None]


def asked_of_step(
    step: Mapping[str, Any], views: Sequence[StepView], earned: Mapping[str, Earned]
) -> dict[str, Any]:
    """What ``views`` ask for of a step, without what is empty: ``badges``, ``flags`` and ``tables``
    of alternatives, as texts.

    ``earned``: by the key of the alternatives, what plays earned that went on with each of them.
    """
    badges = [step[view.badge] for view in views if view.badge and step.get(view.badge)]
    flags = [step[flag] for view in views for flag in view.flags if step.get(flag)]
    asked = [view.alternatives for view in views if view.alternatives is not None]
    tables = [_table(step, view, earned.get(view.key, {})) for view in asked if step.get(view.key)]
    found = {"badges": badges, "flags": flags, "tables": tables}
    return {key: value for key, value in found.items() if value}


def _table(step: Mapping[str, Any], view: AlternativesView, earned: Earned) -> dict[str, Any]:
    entries = sorted(step[view.key], key=lambda entry: entry[view.badge])
    titles = [(column.title, column.hint) for column in view.columns]
    columns = [_cells(entries, column) for column in view.columns]
    if earned:
        plays = max(map(len, earned.values()))
        titles.append((f"{EARNED.title}, {plays} plays", EARNED.hint))
        of_entries = [earned.get(entry[view.badge]) for entry in entries]
        means = [{EARNED.key: fmean(returns)} if returns else {} for returns in of_entries]
        columns.append(_cells(means, EARNED))
    lines = [
        {
            "number": entry[view.badge],
            "text": entry[view.text],
            "chosen": bool(entry[view.chosen]),
            "cells": [column[index] for column in columns],
        }
        for index, entry in enumerate(entries)
    ]
    key, sentence = view.note
    note = sentence.format(step[key]) if step.get(key) is not None else ""
    return {
        "heads": [view.badge, view.text, *(title for title, _ in titles)],
        "hints": ["", "", *(hint for _, hint in titles)],
        "lines": lines,
        "note": note,
    }


def _cells(entries: Sequence[dict[str, Any]], column: NumberColumn) -> list[tuple[str, bool]]:
    """A text per entry and whether it is the best; empty where it has no such number."""
    values = [entry.get(column.key) for entry in entries]
    known = [value for value in values if value is not None]
    # The largest of numbers that do not differ says nothing.
    best = max(known) if column.best and len(set(known)) > 1 else None
    cells = []
    for value in values:
        text = "" if value is None else column.form.format(value)
        cells.append((text, best is not None and value == best))
    return cells


def read_trajectories(path: Path, most: int | None = None) -> list[dict[str, Any]]:
    """The trajectories of a rollout file: rows of the same ``traj_uid`` are merged, steps in
    order.

    Of a file of more than ``most`` characters, those that are whole in its beginning.
    """
    merged: dict[str, dict[str, Any]] = {}
    for count, line in enumerate(jsonl.read(path, most)):
        known = merged.setdefault(str(line.get("traj_uid", count)), {**line, "steps": []})
        known["steps"] = known["steps"] + list(line.get("steps") or [])
    for trajectory in merged.values():
        trajectory["steps"].sort(key=lambda step: step.get("step", 0))
    if most is None or path.stat().st_size <= most:
        return list(merged.values())
    return [row for row in merged.values() if len(row["steps"]) >= row.get("length", 0)]


def contrasting(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
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


def one_of_each(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first won and the first lost row that have steps."""
    usable = [row for row in rows if row["steps"] and not row.get("aborted")]
    won = [row for row in usable if row.get("won")]
    lost = [row for row in usable if not row.get("won")]
    return [*won[:1], *lost[:1]]
