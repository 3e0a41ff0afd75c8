"""Which tasks are played when: chosen by counters and hashes, never by what was drawn before."""

import hashlib
import json
from collections.abc import Mapping, Sequence

from agent_system.environments.env import Task
from verl.utils.seeds import derive_seed

# 31 bits: what every environment's random generator takes, also as a signed integer.
SEED_BITS = 0x7FFFFFFF
WHOLE = ""  # the one part of what is no mixture


def epoch_order(count: int, *parts: int | str) -> list[int]:
    """A permutation of ``range(count)`` that depends on ``parts`` alone."""
    # Sorted by hashes: no generator whose algorithm a library may change.
    return sorted(range(count), key=lambda index: derive_seed(*parts, index))


def turns(weights: Mapping[str, int]) -> list[str]:
    """One round of the parts: each as often as its weight, spread as evenly as it goes.

    At every place stands the part that is furthest behind its share; the first one of equals.
    """
    total = sum(weights.values())
    played = dict.fromkeys(weights, 0)
    order: list[str] = []
    for place in range(1, total + 1):
        behind = {part: weights[part] * place - played[part] * total for part in weights}
        part = max(behind, key=lambda name: behind[name])
        played[part] += 1
        order.append(part)
    return order


def interleaved(parts: Mapping[str, Sequence[Task]], weights: Mapping[str, int]) -> list[Task]:
    """All tasks of all parts, by turns; a part that has no more is left out."""
    left = {part: list(reversed(parts[part])) for part in weights}
    found: list[Task] = []
    while any(left.values()):
        found += [left[part].pop() for part in turns(weights) if left[part]]
    return found


def by_part(tasks: Sequence[Task], weights: Mapping[str, int]) -> dict[str, list[Task]]:
    """The tasks of each part, in order; all under one name where there are no weights."""
    found: dict[str, list[Task]] = {part: [] for part in weights or (WHOLE,)}
    for task in tasks:
        found[task["part"] if weights else WHOLE].append(task)
    return found


class Schedule:
    """Which task is played when: parts by turns (``weights``; empty: there is one), and of each
    part one epoch after another, shuffled by ``seed`` or in their own order.

    Counted, not remembered: the same number gives the same task, however the run came there.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        weights: Mapping[str, int],
        shuffle: bool,
        seed: tuple[int | str, ...],
    ) -> None:
        self._parts = by_part(tasks, weights)
        self._round = turns(weights) or [WHOLE]
        self._shuffle = shuffle
        self._seed = seed
        # Of each part, of the epoch last asked for.
        self._orders: dict[str, tuple[tuple[int, int], list[int]]] = {}

    def task(self, number: int, draw: int = 0) -> Task:
        """The task with this number, counted from 0; ``draw`` > 0 shuffles in other ways."""
        rounds, place = divmod(number, len(self._round))
        part = self._round[place]
        before = rounds * self._round.count(part) + self._round[:place].count(part)
        tasks = self._parts[part]
        epoch, index = divmod(before, len(tasks))
        return tasks[self._order(part, draw, epoch)[index]]

    def _order(self, part: str, draw: int, epoch: int) -> list[int]:
        count = len(self._parts[part])
        if not self._shuffle:
            return list(range(count))
        known = self._orders.get(part)
        # Only the last epoch is kept: steps come in order, and any other one can be made again.
        if known is None or known[0] != (draw, epoch):
            named = () if part == WHOLE else (part,)
            order = epoch_order(count, *self._seed, "order", *named, draw, epoch)
            self._orders[part] = known = ((draw, epoch), order)
        return known[1]


def panel_of(
    tasks: Sequence[Task], size: int | None, weights: Mapping[str, int] | None = None
) -> list[tuple[Task, int]]:
    """The validation panel: ``size`` tasks (all if fewer, or None) with their environment seeds;
    of the parts of a mixture by ``weights``.

    It depends on the tasks alone, not on the run's seed, so runs with different seeds are measured
    on the same panel.
    """
    ordered = sorted(tasks, key=lambda task: derive_seed("panel", task["task_id"]))
    if weights:
        ordered = interleaved(by_part(ordered, weights), weights)
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
