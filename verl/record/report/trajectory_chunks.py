"""Trajectories of a page: one compressed chunk per rollout file, and an index of all chunks.

    rollouts/<step>.jsonl ──compress_rollout_file()──┬──▶ summary per trajectory ──▶ index
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
from verl.records import SUMMARY
from verl.report_sections import (
    AlternativesView,
    NumberColumn,
    Outcomes,
    TurnView,
    load_contributions,
)
from verl.utils import jsonl
from verl.utils.commands import convert_read_errors

# Maximum size of all rollout files of one page, bytes. Compression divides it by about 15.
MAX_PAGE_BYTES = 80_000_000
MAX_FILE_BYTES = 24_000_000  # maximum number of bytes that are read of one file
TOKEN_VALUE_DIGITS = 4  # decimal places of token values
COPIED_STEP_KEYS = ("step", "observation", "action", "reward", "advantage")
KINDS = ("train", "val", "audit")  # training, validation, trajectories of main_audit
AUDIT_FOLDER = "audit"  # folder in the run directory with the trajectories of main_audit
# (traj_uid, turn number) -> entry of the turn in the token file
TokenValues = Mapping[tuple[str, int], Mapping[str, Any]]
# number of an alternative text of a turn -> returns of the trajectories that continued with it
ReturnsByAlternative = Mapping[int, Sequence[float]]
MEAN_RETURN_HINT = "mean return of the trajectories that continued from this turn with it"
MEAN_RETURN_COLUMN = NumberColumn(
    "mean_return", "executed return", "{:.2f}", MEAN_RETURN_HINT, highlights_largest=True
)


@dataclass(frozen=True)
class RolloutFile:
    """Path of a rollout file, which has the trajectories of a step."""

    path: Path
    kind: str  # one of ``KINDS``
    step: int
    tokens: Path | None = None  # token file of the step, which may not exist; not for validations

    @property
    def name(self) -> str:
        """Return the name by which the page requests the file, for example ``train-20``."""
        return f"{self.kind}-{self.step}"

    @property
    def bytes_read(self) -> int:
        """Return the number of bytes that are read: the file size, at most ``MAX_FILE_BYTES``."""
        return min(self.path.stat().st_size, MAX_FILE_BYTES)


@dataclass(frozen=True)
class TrajectoryChunk:
    """Compressed trajectories (``packed``) of a rollout file, and their index entry ``summary``."""

    summary: dict[str, Any]
    packed: bytes


def list_rollout_files(directory: RunDirectory) -> list[RolloutFile]:
    """Return all rollout files of a run, ordered by step and kind."""
    files = []
    audit_directory = RunDirectory(directory.path / AUDIT_FOLDER)
    for kind in KINDS:
        run_directory = audit_directory if kind == AUDIT_FOLDER else directory
        is_validation = kind == "val"
        for step in run_directory.rollout_steps(is_validation):
            path = run_directory.rollout_path(step, is_validation)
            token_file = None if is_validation else run_directory.token_path(step)
            files.append(RolloutFile(path, kind, step, token_file))
    return sorted(files, key=lambda file: file.step)  # the order of equal steps is kept


def select_files_within_budget(
    files: Sequence[RolloutFile], budget: int = MAX_PAGE_BYTES
) -> list[RolloutFile]:
    """Select the rollout files that the page contains, with at most ``budget`` bytes in total.

    All ``files`` are selected if they are small enough. Otherwise every n-th file and the last file
    of each kind are selected. n is the smallest of 2, 4, 8, ... that is sufficient. The first and
    the last file of each kind are always selected, even if they alone exceed ``budget``.
    """
    selected_files = list(files)
    stride = 1
    while sum(file.bytes_read for file in selected_files) > budget and stride < len(files):
        stride *= 2
        selected_files = [file for kind in KINDS for file in _select_every_nth(files, kind, stride)]
    return sorted(selected_files, key=lambda file: file.step)


def _select_every_nth(files: Sequence[RolloutFile], kind: str, stride: int) -> list[RolloutFile]:
    files_of_kind = [file for file in files if file.kind == kind]
    # Count from the first file, so that new files do not change the selection of cached files.
    last_index = len(files_of_kind) - 1
    return [file for i, file in enumerate(files_of_kind) if i % stride == 0 or i == last_index]


def compress_rollout_file(file: RolloutFile) -> TrajectoryChunk:
    """Return index entry and compressed trajectories of a rollout file, cached until it changes.

    Raises ``UsageError`` if its rows are not trajectories of a run.
    """
    file_status = file.path.stat()
    with convert_read_errors(file.path):
        return _compress_cached(
            file, tuple(list_turn_views()), file_status.st_size, file_status.st_mtime_ns
        )


@functools.lru_cache(maxsize=1024)
def _compress_cached(
    file: RolloutFile, views: tuple[TurnView, ...], file_size: int, _modified_ns: int
) -> TrajectoryChunk:
    rows = read_trajectories(file.path, MAX_FILE_BYTES)
    token_values = _read_token_values(file.tokens) if file.tokens else {}
    run_dir = file.path.parent.parent
    alternatives_views = [view.alternatives for view in views if view.alternatives is not None]
    outcomes_by_key = {
        view.key: view.outcomes(run_dir) for view in alternatives_views if view.outcomes
    }
    trajectories = [
        _make_trajectory_entry(row, views, token_values, outcomes_by_key) for row in rows
    ]
    summary = _summarize_trajectories(rows, file) | {"whole": file_size <= MAX_FILE_BYTES}
    audited_names = {
        name for outcomes_of_view in outcomes_by_key.values() for name, _ in outcomes_of_view
    }
    if audited_names:
        summary["audited"] = [int(entry["name"] in audited_names) for entry in trajectories]
    return TrajectoryChunk(summary, compress_json({"trajectories": trajectories}))


def _read_token_values(path: Path) -> TokenValues:
    token_values: dict[tuple[str, int], dict[str, Any]] = {}
    summaries = {}
    for line in jsonl.read(path, MAX_FILE_BYTES):
        name = str(line["traj_uid"])
        token_values |= {(name, step["step"]): step for step in line["steps"]}
        if line.get(SUMMARY):
            summaries[name, line[SUMMARY]["step"] - 1] = line[SUMMARY]
    for turn_key, summary in summaries.items():
        if turn_key in token_values:
            token_values[turn_key][SUMMARY] = summary
    return token_values


def _summarize_trajectories(rows: Sequence[dict[str, Any]], file: RolloutFile) -> dict[str, Any]:
    task_by_group: dict[str, str] = {}
    for row in rows:
        task_by_group.setdefault(str(row.get("uid")), str(row.get("task_id")))
    group_numbers = {uid: group_number for group_number, uid in enumerate(task_by_group)}
    return {
        "name": file.name,
        "kind": file.kind,
        "step": file.step,
        "tasks": list(task_by_group.values()),
        "group": [group_numbers[str(row.get("uid"))] for row in rows],
        "won": [int(bool(row.get("won"))) for row in rows],
        "return": [_round_or_zero(row.get("return")) for row in rows],
        "turns": [len(row["steps"]) for row in rows],
        "tokens": [count_sampled_tokens(row["steps"]) for row in rows],
        "pair": [rows.index(row) for row in pick_success_and_failure(rows)],
    }


def _make_trajectory_entry(
    row: Mapping[str, Any],
    views: Sequence[TurnView],
    token_values: TokenValues,
    outcomes_by_key: Mapping[str, Outcomes],
) -> dict[str, Any]:
    """Return the page's entry of a trajectory.

    ``outcomes_by_key`` maps a key of the turns, which holds alternative texts, to the returns of
    the trajectories that were continued with them.
    """
    name = str(row.get("traj_uid"))
    steps = []
    for step in row["steps"]:
        turn_key = (name, step.get("step", 0))
        outcomes_of_turn = {
            key: returns.get(turn_key, {}) for key, returns in outcomes_by_key.items()
        }
        view_fields = collect_turn_view_fields(step, views, outcomes_of_turn)
        steps.append(_make_turn_entry(step, view_fields, token_values.get(turn_key, {})))
    aborted = bool(row.get("aborted"))
    return {"name": name, "prompt": row.get("prompt", ""), "aborted": aborted, "steps": steps}


def _make_turn_entry(
    step: Mapping[str, Any], view_fields: Mapping[str, Any], token_values: Mapping[str, Any]
) -> dict[str, Any]:
    entry = {key: step[key] for key in COPIED_STEP_KEYS if step.get(key) is not None}
    entry |= view_fields
    entry |= _make_token_fields(step, token_values)
    if step.get(SUMMARY):
        entry[SUMMARY] = _make_token_fields(step[SUMMARY], token_values.get(SUMMARY, {}))
    if not step.get("is_action_valid", True):
        entry["invalid"] = True
    if step.get("stop_reason") == "length":
        entry["cut"] = True
    return entry


def _make_token_fields(step: Mapping[str, Any], token_values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tokens of a turn, and for each token the values by which the page colours it.

    Returns the reply as one text if the turn has no token texts. ``token_values`` is the entry of
    the turn in the token file.
    """
    state_field = {"state": token_values["state"]} if "state" in token_values else {}
    texts_and_advantages = step.get("token_credit") or []
    if not texts_and_advantages:
        return state_field | {"response": step.get("response", "")}
    advantages = [_round_or_zero(value) for _, value in texts_and_advantages]
    mask = token_values.get("mask", [])
    if sum(mask) != len(advantages):
        return state_field | {
            "tokens": [text for text, _ in texts_and_advantages],
            "overlays": {"advantage": advantages},
        }
    next_advantages = iter(advantages)
    overlays = {"advantage": [next(next_advantages) if is_sampled else None for is_sampled in mask]}
    # Fewer digits than in the file suffice for colours, and the page becomes half as large.
    if "entropy" in token_values:
        overlays["entropy"] = [round(value or 0.0, 2) for value in token_values["entropy"]]
    if "gap" in token_values:
        overlays["gap"] = [gap and float(f"{gap:.1g}") for gap in token_values["gap"]]
    overlays["mask"] = token_values.get("weight", mask)
    return state_field | {"tokens": token_values["tokens"], "overlays": overlays}


def _round_or_zero(value: float | None) -> float:
    # The file has null in place of NaN and infinite values.
    return round(value or 0.0, TOKEN_VALUE_DIGITS)


def compress_json(value: object) -> bytes:
    """Return ``value`` as gzip-compressed JSON. Equal values give equal bytes."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    # Lone surrogates cannot be encoded and become question marks.
    return gzip.compress(text.encode(errors="replace"), 6, mtime=0)


def encode_base64(data: bytes) -> str:
    """Return ``data`` as base64 text, which can be embedded in HTML."""
    return base64.b64encode(data).decode("ascii")


def build_trajectory_index(chunks: Sequence[TrajectoryChunk]) -> dict[str, Any]:
    """Return the index (outcome, return and group of each trajectory) that the page reads first."""
    return {
        "files": [chunk.summary for chunk in chunks],
        "lead": " ".join(view.lead for view in list_turn_views() if view.lead),
    }


# ---- views of turns, and trajectories of rollout files ------------------------------------------


def list_turn_views() -> list[TurnView]:
    """Return the views: labels, warnings and tables that methods and environments add to turns."""
    step_views = [contribution.turn_view for contribution in load_contributions()]
    return [view for view in step_views if view is not None]


def collect_turn_view_fields(
    step: Mapping[str, Any],
    views: Sequence[TurnView],
    outcomes: Mapping[str, ReturnsByAlternative],
) -> dict[str, Any]:
    """Return the labels, warnings and tables that ``views`` add to the display of a turn.

    ``step`` is the turn's record of the rollout file. The keys of the result are ``badges``
    (labels), ``flags`` (warnings) and ``tables``; empty ones are omitted. A table lists
    alternatives to a part of the turn, which the record has under one key. ``outcomes`` maps this
    key to the returns of trajectories that were continued with each alternative.
    """
    badges = [step[view.badge_key] for view in views if view.badge_key and step.get(view.badge_key)]
    flags = [step[flag_key] for view in views for flag_key in view.flags if step.get(flag_key)]
    alternatives_views = [view.alternatives for view in views if view.alternatives is not None]
    tables = [
        _build_alternatives_table(step, view, outcomes.get(view.key, {}))
        for view in alternatives_views
        if step.get(view.key)
    ]
    fields = {"badges": badges, "flags": flags, "tables": tables}
    return {key: value for key, value in fields.items() if value}


def _build_alternatives_table(
    step: Mapping[str, Any], view: AlternativesView, returns_by_alternative: ReturnsByAlternative
) -> dict[str, Any]:
    alternatives = sorted(step[view.key], key=lambda alternative: alternative[view.badge_key])
    titles_and_hints = [(column.title, column.hint) for column in view.columns]
    columns = [_format_column(alternatives, column) for column in view.columns]
    if returns_by_alternative:
        num_returns = max(map(len, returns_by_alternative.values()))
        titles_and_hints.append(
            (f"{MEAN_RETURN_COLUMN.title}, n = {num_returns}", MEAN_RETURN_COLUMN.hint)
        )
        mean_return_entries = []
        for alternative in alternatives:
            returns = returns_by_alternative.get(alternative[view.badge_key])
            mean_return_entries.append({MEAN_RETURN_COLUMN.key: fmean(returns)} if returns else {})
        columns.append(_format_column(mean_return_entries, MEAN_RETURN_COLUMN))
    lines = [
        {
            "number": alternative[view.badge_key],
            "text": alternative[view.text],
            "chosen": bool(alternative[view.chosen_key]),
            "cells": [column[index] for column in columns],
        }
        for index, alternative in enumerate(alternatives)
    ]
    note_key, note_template = view.note
    note = note_template.format(step[note_key]) if step.get(note_key) is not None else ""
    return {
        "heads": [view.badge_key, view.text, *(title for title, _ in titles_and_hints)],
        "hints": ["", "", *(hint for _, hint in titles_and_hints)],
        "lines": lines,
        "note": note,
    }


def _format_column(
    entries: Sequence[dict[str, Any]], column: NumberColumn
) -> list[tuple[str, bool]]:
    """Return a column of a table of alternatives, as one pair (text, is highlighted) per line.

    ``entries`` has the number of each line under ``column.key``. If ``column.best`` is set, the
    largest number is highlighted, unless all are equal.
    """
    values = [entry.get(column.key) for entry in entries]
    present_values = [value for value in values if value is not None]
    best_value = (
        max(present_values) if column.highlights_largest and len(set(present_values)) > 1 else None
    )
    cells = []
    for value in values:
        text = "" if value is None else column.number_format.format(value)
        cells.append((text, best_value is not None and value == best_value))
    return cells


def read_trajectories(path: Path, max_characters: int | None = None) -> list[dict[str, Any]]:
    """Read the trajectories of a rollout file. Merge rows of the same ``traj_uid``.

    The policy's summary of an episode (``env.compact``) is stored in the turn before it, with the
    key ``summary``. Only the first ``max_characters`` characters are read. Trajectories that are
    not complete in this part of the file are skipped.
    """
    merged_rows: dict[str, dict[str, Any]] = {}
    for line_number, line in enumerate(jsonl.read(path, max_characters)):
        name = str(line.get("traj_uid", line_number))
        row = merged_rows.setdefault(name, {**line, "steps": [], SUMMARY: []})
        row["steps"] += line.get("steps") or []
        row[SUMMARY] += [line[SUMMARY]] if line.get(SUMMARY) else []
    for trajectory in merged_rows.values():
        trajectory["steps"].sort(key=lambda step: step.get("step", 0))
        summaries = {summary["step"] - 1: summary for summary in trajectory.pop(SUMMARY)}
        for step in trajectory["steps"]:
            if step.get("step") in summaries:
                step[SUMMARY] = summaries[step["step"]]
    if max_characters is None or path.stat().st_size <= max_characters:
        return list(merged_rows.values())
    return [row for row in merged_rows.values() if len(row["steps"]) >= row.get("length", 0)]


def count_sampled_tokens(steps: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of sampled tokens of the turns ``steps`` and of their summaries."""
    turns_and_summaries = [*steps, *(step[SUMMARY] for step in steps if step.get(SUMMARY))]
    return sum(turn_or_summary.get("num_tokens") or 0 for turn_or_summary in turns_and_summaries)


def pick_success_and_failure(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a short successful and a short unsuccessful trajectory, of one task if possible."""
    rows_by_group = defaultdict(list)
    for row in sorted(rows, key=lambda row: len(row["steps"])):
        rows_by_group[row.get("uid")].append(row)
    for group_rows in rows_by_group.values():
        if len({bool(row.get("won")) for row in group_rows}) == 2:
            return pick_first_of_each_outcome(group_rows)
    return pick_first_of_each_outcome(rows)


def pick_first_of_each_outcome(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the first successful and the first unsuccessful trajectory.

    Trajectories without turns, or ended by an error, are skipped.
    """
    complete_rows = [row for row in rows if row["steps"] and not row.get("aborted")]
    successes = [row for row in complete_rows if row.get("won")]
    failures = [row for row in complete_rows if not row.get("won")]
    return [*successes[:1], *failures[:1]]
