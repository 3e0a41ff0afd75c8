"""Trajectories in the form in which the report page shows them.

The batch rows of a trajectory are merged. Its turns have badges, flags and tables of alternatives.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from verl.report_sections import AlternativesView, NumberColumn, StepView, load_contributions
from verl.utils import jsonl

# For each alternative of a turn (its number): returns of trajectories that continued with it.
ReturnsByAlternative = Mapping[int, Sequence[float]]
MEAN_RETURN = NumberColumn(
    "mean_return",
    "executed return",
    "{:.2f}",
    "mean return of the trajectories that continued from this turn with it",
    best=True,
)


def step_views() -> list[StepView]:
    """Return the declarations of turn fields to show, from methods and environments."""
    declared = [contribution.steps for contribution in load_contributions()]
    return [view for view in declared if view is not None]


def extra_step_fields(
    step: Mapping[str, Any],
    views: Sequence[StepView],
    outcomes: Mapping[str, ReturnsByAlternative],
) -> dict[str, Any]:
    """Return the non-empty fields that ``views`` declare for a turn, as texts.

    The fields are ``badges``, ``flags`` and ``tables`` of alternatives. A turn record has the
    alternatives under a key, for example ``contexts``. ``outcomes`` maps this key to the returns of
    the trajectories that continued with each alternative.
    """
    badges = [step[view.badge] for view in views if view.badge and step.get(view.badge)]
    flags = [step[flag_key] for view in views for flag_key in view.flags if step.get(flag_key)]
    declared = [view.alternatives for view in views if view.alternatives is not None]
    present_views = [view for view in declared if step.get(view.key)]
    tables = [_alternatives_table(step, view, outcomes.get(view.key, {})) for view in present_views]
    fields = {"badges": badges, "flags": flags, "tables": tables}
    return {key: value for key, value in fields.items() if value}


def _alternatives_table(
    step: Mapping[str, Any], view: AlternativesView, returns_of: ReturnsByAlternative
) -> dict[str, Any]:
    entries = sorted(step[view.key], key=lambda entry: entry[view.badge])
    titles = [(column.title, column.hint) for column in view.columns]
    columns = [_column_cells(entries, column) for column in view.columns]
    if returns_of:
        count = max(map(len, returns_of.values()))
        titles.append((f"{MEAN_RETURN.title}, n = {count}", MEAN_RETURN.hint))
        of_entries = [returns_of.get(entry[view.badge]) for entry in entries]
        means = [{MEAN_RETURN.key: fmean(returns)} if returns else {} for returns in of_entries]
        columns.append(_column_cells(means, MEAN_RETURN))
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


def _column_cells(
    entries: Sequence[dict[str, Any]], column: NumberColumn
) -> list[tuple[str, bool]]:
    """Return for each entry the formatted number, and True if it is the largest of the column."""
    values = [entry.get(column.key) for entry in entries]
    known_values = [value for value in values if value is not None]
    # If all numbers are equal, none is marked.
    best_value = max(known_values) if column.best and len(set(known_values)) > 1 else None
    cells = []
    for value in values:
        text = "" if value is None else column.form.format(value)
        cells.append((text, best_value is not None and value == best_value))
    return cells


def read_trajectories(path: Path, most: int | None = None) -> list[dict[str, Any]]:
    """Read the trajectories of a rollout file. Merge rows of the same ``traj_uid``.

    Only the first ``most`` characters of the file are read. Trajectories that are incomplete there
    are skipped.
    """
    merged_rows: dict[str, dict[str, Any]] = {}
    for count, line in enumerate(jsonl.read(path, most)):
        name = str(line.get("traj_uid", count))
        merged_rows.setdefault(name, {**line, "steps": []})["steps"] += line.get("steps") or []
    for trajectory in merged_rows.values():
        trajectory["steps"].sort(key=lambda step: step.get("step", 0))
    if most is None or path.stat().st_size <= most:
        return list(merged_rows.values())
    return [row for row in merged_rows.values() if len(row["steps"]) >= row.get("length", 0)]


def pick_success_and_failure(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a successful and a failed trajectory, from the same group if possible.
    Trajectories with few turns are preferred.
    """
    groups = defaultdict(list)
    for row in sorted(rows, key=lambda row: len(row["steps"])):
        groups[row.get("uid")].append(row)
    for members in groups.values():
        if len({bool(row.get("won")) for row in members}) == 2:
            return first_of_each_outcome(members)
    return first_of_each_outcome(rows)


def first_of_each_outcome(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the first successful and the first failed trajectory that has turns."""
    complete_rows = [row for row in rows if row["steps"] and not row.get("aborted")]
    successes = [row for row in complete_rows if row.get("won")]
    failures = [row for row in complete_rows if not row.get("won")]
    return [*successes[:1], *failures[:1]]
