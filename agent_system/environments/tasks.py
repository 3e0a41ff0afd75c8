"""Which tasks are played when: chosen by counters and hashes, never by what was drawn before."""

import hashlib
import json
from collections.abc import Sequence

from agent_system.environments.base import Task
from verl.utils.seeds import derive_seed

# 31 bits: what every environment's random generator takes, also as a signed integer.
SEED_BITS = 0x7FFFFFFF


def epoch_order(count: int, *parts: int | str) -> list[int]:
    """A permutation of ``range(count)`` that depends on ``parts`` alone."""
    # Sorted by hashes: no generator whose algorithm a library may change.
    return sorted(range(count), key=lambda index: derive_seed(*parts, index))


def panel_of(tasks: Sequence[Task], size: int | None) -> list[tuple[Task, int]]:
    """The validation panel: ``size`` tasks (all if fewer, or None) with their environment seeds.

    It depends on the tasks alone, not on the run's seed, so runs with different seeds are measured
    on the same panel.
    """
    ordered = sorted(tasks, key=lambda task: derive_seed("panel", task["task_id"]))
    return [
        (task, derive_seed("panel", task["task_id"], "env") & SEED_BITS) for task in ordered[:size]
    ]


def panel_digest(panel: Sequence[tuple[Task, int]]) -> str:
    """Hash (16 hexadecimal digits) of the panel's tasks and seeds, in order."""
    text = json.dumps([[task, seed] for task, seed in panel], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def check_disjoint(train: Sequence[Task], val: Sequence[Task]) -> None:
    """Raise ``ValueError`` when a task id occurs twice or in both splits, or when a task lacks a
    required key.
    """
    for task in [*train, *val]:
        if not isinstance(task.get("task_id"), str) or not isinstance(task.get("data_source"), str):
            raise ValueError(
                f"a task needs the strings task_id and data_source, got {str(task)[:200]}"
            )
    ids = {"train": [task["task_id"] for task in train], "val": [task["task_id"] for task in val]}
    for split, names in ids.items():
        if len(set(names)) != len(names):
            raise ValueError(
                f"{len(names) - len(set(names))} task ids occur more than once in split {split!r}"
            )
    common = sorted(set(ids["train"]) & set(ids["val"]))
    if common:
        raise ValueError(f"{len(common)} tasks are in both train and val, the first: {common[0]!r}")
