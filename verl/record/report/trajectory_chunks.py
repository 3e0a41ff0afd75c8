"""Trajectories of a page: one compressed chunk per rollout file, and an index of all chunks.

    rollouts/<step>.jsonl ──pack_file()──▶ summary: outcome, return, group per trajectory ──▶ index
                                      └──▶ chunk: turns and tokens, gzip of JSON

The page reads the index when it opens, and a chunk when a user selects one of its trajectories.
"""

import base64
import functools
import gzip
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from verl.record.run_dir import RunDirectory
from verl.report_sections import (
    AlternativesView,
    NumberColumn,
    Outcomes,
    StepView,
    load_contributions,
)
from verl.utils import jsonl

BUDGET = 80_000_000  # bytes of rollout files in one page; compressed they are about 1/15 of that
LARGEST = 24_000_000  # maximum number of bytes that are read of one file
DIGITS = 4  # decimal places of token values
KEPT = ("step", "observation", "action", "reward", "advantage")
KINDS = ("train", "val", "audit")
AUDIT = "audit"  # folder in the run directory with the trajectories of main_audit
TokenValues = Mapping[tuple[str, int], Mapping[str, Any]]  # by traj_uid and turn number
# For each alternative of a turn (its number): returns of trajectories that continued with it.
ReturnsByAlternative = Mapping[int, Sequence[float]]
MEAN_RETURN_HINT = "mean return of the trajectories that continued from this turn with it"
MEAN_RETURN = NumberColumn("mean_return", "executed return", "{:.2f}", MEAN_RETURN_HINT, best=True)


@dataclass(frozen=True)
class RolloutFile:
    """A rollout file of ``kind`` ``train``, ``val`` or ``audit``.

    ``tokens`` is the path of the file with entropies and masks of its tokens, which may be missing.
    """

    path: Path
    kind: str
    step: int
    tokens: Path | None = None

    @property
    def name(self) -> str:
        """Return the name by which the page requests the file, for example ``train-20``."""
        return f"{self.kind}-{self.step}"

    @property
    def bytes_read(self) -> int:
        """Return the number of bytes that the report reads: the file size, at most ``LARGEST``."""
        return min(self.path.stat().st_size, LARGEST)


@dataclass(frozen=True)
class Chunk:
    """Index entry and compressed trajectories of a rollout file."""

    summary: dict[str, Any]
    packed: bytes


def rollout_files(directory: RunDirectory) -> list[RolloutFile]:
    """Return all rollout files of a run and its audit by step, training before validation."""
    files = []
    for kind in KINDS:
        run = RunDirectory(directory.path / AUDIT) if kind == AUDIT else directory
        is_val = kind == "val"
        for step in run.rollout_steps(is_val):
            tokens = None if is_val else run.token_path(step)
            files.append(RolloutFile(run.rollout_path(step, is_val), kind, step, tokens))
    return sorted(files, key=_sort_key)


def _sort_key(file: RolloutFile) -> tuple[int, int]:
    return file.step, KINDS.index(file.kind)


def select_within_budget(files: Sequence[RolloutFile], budget: int = BUDGET) -> list[RolloutFile]:
    """Return all ``files``, or a selection with at most ``budget`` bytes.

    It has the last file of each kind and every n-th file, with n = 2, 4, 8, ...
    """
    selected_files = list(files)
    stride = 1
    while sum(file.bytes_read for file in selected_files) > budget and stride < len(files):
        stride *= 2
        selected_files = [file for kind in KINDS for file in _every_nth(files, kind, stride)]
    return sorted(selected_files, key=_sort_key)


def _every_nth(files: Sequence[RolloutFile], kind: str, stride: int) -> list[RolloutFile]:
    of_kind = [file for file in files if file.kind == kind]
    # Count from the first file: as a run grows, the selected files stay the same and are cached.
    return [file for n, file in enumerate(of_kind) if n % stride == 0 or n == len(of_kind) - 1]


def pack_file(file: RolloutFile) -> Chunk:
    """Return summary and compressed trajectories of ``file``. Cached until the file changes."""
    status = file.path.stat()
    return _pack_cached(file, tuple(step_views()), status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=1024)
def _pack_cached(file: RolloutFile, views: tuple[StepView, ...], size: int, _time: int) -> Chunk:
    rows = read_trajectories(file.path, LARGEST)
    tokens = _read_tokens(file.tokens) if file.tokens else {}
    run_dir = file.path.parent.parent
    declared = [view.alternatives for view in views if view.alternatives is not None]
    outcomes = {view.key: view.outcomes(run_dir) for view in declared if view.outcomes is not None}
    step_extras = StepExtras(views, tokens, outcomes)
    trajectories = [_trajectory_entry(row, step_extras) for row in rows]
    summary = _summarise_rows(rows, file) | {"whole": size <= LARGEST}
    returned_to = {name for of_view in outcomes.values() for name, _ in of_view}
    if returned_to:
        summary["audited"] = [int(entry["name"] in returned_to) for entry in trajectories]
    return Chunk(summary, compress_json({"plays": trajectories}))


@dataclass(frozen=True)
class StepExtras:
    """Data about turns in addition to their records.

    ``outcomes`` maps the record key of alternatives (for example ``contexts``) to the returns of
    trajectories that continued with one of them.
    """

    views: Sequence[StepView]
    tokens: TokenValues
    outcomes: Mapping[str, Outcomes]


def _read_tokens(path: Path) -> TokenValues:
    return {
        (str(line["traj_uid"]), step["step"]): step
        for line in jsonl.read(path, LARGEST)
        for step in line["steps"]
    }


def _summarise_rows(rows: Sequence[dict[str, Any]], file: RolloutFile) -> dict[str, Any]:
    groups: dict[str, int] = {}
    tasks = []
    numbers = []
    for row in rows:
        uid = str(row.get("uid"))
        if uid not in groups:
            groups[uid] = len(groups)
            tasks.append(str(row.get("task_id")))
        numbers.append(groups[uid])
    return {
        "name": file.name,
        "kind": file.kind,
        "step": file.step,
        "tasks": tasks,
        "group": numbers,
        "won": [int(bool(row.get("won"))) for row in rows],
        "return": [_round_value(row.get("return")) for row in rows],
        "turns": [len(row["steps"]) for row in rows],
        "tokens": [sum(step.get("num_tokens") or 0 for step in row["steps"]) for row in rows],
        "pair": [rows.index(row) for row in pick_success_and_failure(rows)],
    }


def _trajectory_entry(row: Mapping[str, Any], step_extras: StepExtras) -> dict[str, Any]:
    name = str(row.get("traj_uid"))
    steps = [_step_entry(step, (name, step.get("step", 0)), step_extras) for step in row["steps"]]
    aborted = bool(row.get("aborted"))
    return {"name": name, "prompt": row.get("prompt", ""), "aborted": aborted, "steps": steps}


def _step_entry(
    step: Mapping[str, Any], place: tuple[str, int], step_extras: StepExtras
) -> dict[str, Any]:
    entry = {key: step[key] for key in KEPT if step.get(key) is not None}
    of_step = {key: outcomes.get(place, {}) for key, outcomes in step_extras.outcomes.items()}
    entry |= extra_step_fields(step, step_extras.views, of_step)
    entry |= _token_overlays(step, step_extras.tokens.get(place, {}))
    if not step.get("is_action_valid", True):
        entry["invalid"] = True
    if step.get("stop_reason") == "length":
        entry["cut"] = True
    return entry


def _token_overlays(step: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tokens of a turn with the values by which the page colours them.

    Without token texts, return the text of the turn. ``values`` is its entry in the token file.
    """
    state = {"state": values["state"]} if "state" in values else {}
    pairs = step.get("token_credit") or []
    if not pairs:
        return state | {"response": step.get("response", "")}
    credit = [_round_value(value) for _, value in pairs]
    mask = values.get("mask", [])
    # Only sampled tokens have advantages. A damaged token file may not match the rollout file.
    if sum(mask) != len(credit):
        return state | {"tokens": [text for text, _ in pairs], "overlays": {"advantage": credit}}
    remaining_credit = iter(credit)
    overlays = {"advantage": [next(remaining_credit) if sampled else None for sampled in mask]}
    # Coarser than the file: colours need few digits, and more would double the size of the page.
    if "entropy" in values:
        overlays["entropy"] = [round(value or 0.0, 2) for value in values["entropy"]]
    if "gap" in values:
        overlays["gap"] = [gap and float(f"{gap:.1g}") for gap in values["gap"]]
    overlays["mask"] = values.get("weight", mask)
    return state | {"tokens": values["tokens"], "overlays": overlays}


def _round_value(value: float | None) -> float:
    # null in the file stands for a value that was not finite
    return round(value or 0.0, DIGITS)


def compress_json(value: object) -> bytes:
    """Return ``value`` as gzip-compressed JSON. Equal values give equal bytes."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return gzip.compress(text.encode(), 6, mtime=0)


def encode_base64(data: bytes) -> str:
    """Return ``data`` as base64 text for an element of the page."""
    return base64.b64encode(data).decode("ascii")


def build_index(chunks: Sequence[Chunk]) -> dict[str, Any]:
    """Return the index of all trajectories, which the page reads when it opens."""
    return {
        "files": [chunk.summary for chunk in chunks],
        "lead": " ".join(view.lead for view in step_views() if view.lead),
    }


# ---- views of turns, and trajectories of rollout files ------------------------------------------


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

    They are ``badges``, ``flags`` and ``tables`` of alternatives. ``outcomes`` has the returns of
    the trajectories that continued with each alternative, by the key of the alternatives in the
    record.
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

    Only the first ``most`` characters are read, and trajectories incomplete there are skipped.
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
    """Return a short successful and a short failed trajectory, of one group if possible."""
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
