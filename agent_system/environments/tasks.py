"""Order in which training steps use the tasks, and a check of the start states of groups.

The order is computed from step numbers and hashes, without a random generator whose state would
have to be saved. A group consists of the rows with the same uid, which have the same task.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from agent_system.environments.env import Task
from agent_system.environments.pool import wire
from verl.config.settings.errors import UserError
from verl.utils.seeds import derive_seed

# 31 bits: the range that every environment's random generator accepts, also as a signed integer.
SEED_MASK = 0x7FFFFFFF
SINGLE_PART_NAME = ""  # name of the only part of an environment that is no mixture


def get_task_number_range(split: str, num_train_tasks: int, num_val_tasks: int) -> range:
    """Return the numbers of the tasks of ``split``; validation has the first ones.

    Example: 8 training and 2 validation tasks have the numbers 2 to 9 and 0 to 1.
    """
    if split == "val":
        return range(num_val_tasks)
    return range(num_val_tasks, num_val_tasks + num_train_tasks)


def compute_epoch_order(count: int, *seed_parts: int | str) -> list[int]:
    """Return a permutation of ``count`` indices, the same for equal arguments."""
    # Sort by hashes: the result does not depend on a library's random generator.
    return sorted(range(count), key=lambda index: derive_seed(*seed_parts, index))


def build_weighted_part_order(weights: Mapping[str, int]) -> list[str]:
    """Return a list that contains each part of a mixture as often as its weight, well mixed.

    Each position gets the part that is furthest behind its proportional count. In a tie it gets the
    first such part::

        {"a": 2, "b": 1}  ->  ["a", "b", "a"]
    """
    total_weight = sum(weights.values())
    count_by_part = dict.fromkeys(weights, 0)
    part_order: list[str] = []
    for position in range(1, total_weight + 1):
        deficit_by_part = {
            part_name: weights[part_name] * position - count_by_part[part_name] * total_weight
            for part_name in weights
        }
        next_part = max(deficit_by_part, key=lambda name: deficit_by_part[name])
        count_by_part[next_part] += 1
        part_order.append(next_part)
    return part_order


def interleave_mixture_tasks(
    tasks_by_part: Mapping[str, Sequence[Task]], weights: Mapping[str, int]
) -> list[Task]:
    """Return the tasks of all parts (mixed environments) in one list.

    The parts alternate in proportion to ``weights``. A part whose tasks are used up is skipped.
    """
    remaining_tasks = {part_name: list(reversed(tasks_by_part[part_name])) for part_name in weights}
    ordered_tasks: list[Task] = []
    while any(remaining_tasks.values()):
        ordered_tasks += [
            remaining_tasks[part].pop()
            for part in build_weighted_part_order(weights)
            if remaining_tasks[part]
        ]
    return ordered_tasks


def group_tasks_by_part(tasks: Sequence[Task], weights: Mapping[str, int]) -> dict[str, list[Task]]:
    """Return the tasks of each environment (part) of a mixture, in the given order.

    Without ``weights`` all tasks are under the key ``SINGLE_PART_NAME``.
    """
    tasks_by_part: dict[str, list[Task]] = {
        part_name: [] for part_name in weights or (SINGLE_PART_NAME,)
    }
    for task in tasks:
        tasks_by_part[task["part"] if weights else SINGLE_PART_NAME].append(task)
    return tasks_by_part


class TaskSchedule:
    """Endless order of the tasks.

    The parts of a mixture alternate in proportion to ``weights``. Each repeats its tasks epoch by
    epoch. Epochs are shuffled by ``seed``, or keep the given order without ``shuffle``. The same
    position always has the same task, so a resumed run continues with the same tasks.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        weights: Mapping[str, int],
        shuffle: bool,
        seed: tuple[int | str, ...],
    ) -> None:
        self._tasks_by_part = group_tasks_by_part(tasks, weights)
        self._part_cycle = build_weighted_part_order(weights) or [SINGLE_PART_NAME]
        self.is_shuffled = shuffle
        self._seed = seed
        # For each part: ((batch_in_step, epoch), order of the tasks) of the last used epoch.
        self._cached_orders: dict[str, tuple[tuple[int, int], list[int]]] = {}

    def get_task(self, order_position: int, batch_in_step: int = 0) -> Task:
        """Return the task at position ``order_position`` (from 0) of the order.

        If tasks are shuffled, each value of ``batch_in_step`` has a separate order.
        """
        cycle_number, cycle_position = divmod(order_position, len(self._part_cycle))
        part_name = self._part_cycle[cycle_position]
        part_position = cycle_number * self._part_cycle.count(part_name) + self._part_cycle[
            :cycle_position
        ].count(part_name)
        tasks = self._tasks_by_part[part_name]
        epoch, index = divmod(part_position, len(tasks))
        return tasks[self._get_epoch_order(part_name, batch_in_step, epoch)[index]]

    def _get_epoch_order(self, part_name: str, batch_in_step: int, epoch: int) -> list[int]:
        num_tasks = len(self._tasks_by_part[part_name])
        if not self.is_shuffled:
            return list(range(num_tasks))
        cached_order = self._cached_orders.get(part_name)
        # Cache the last epoch only: steps come in order, and other epochs can be computed again.
        if cached_order is None or cached_order[0] != (batch_in_step, epoch):
            part_seed = () if part_name == SINGLE_PART_NAME else (part_name,)
            order = compute_epoch_order(
                num_tasks, *self._seed, "order", *part_seed, batch_in_step, epoch
            )
            self._cached_orders[part_name] = cached_order = ((batch_in_step, epoch), order)
        return cached_order[1]


def select_validation_set(
    tasks: Sequence[Task], max_tasks: int | None, weights: Mapping[str, int] | None = None
) -> list[tuple[Task, int]]:
    """Return at most ``max_tasks`` tasks with their environment seeds; None takes all tasks.

    The result does not depend on the seed of the run: all runs have the same validation set.
    """
    # The word ``panel`` is part of the seeds: another word would select another validation set.
    ordered_tasks = sorted(tasks, key=lambda task: derive_seed("panel", task["task_id"]))
    if weights:
        ordered_tasks = interleave_mixture_tasks(
            group_tasks_by_part(ordered_tasks, weights), weights
        )
    return [
        (task, derive_seed("panel", task["task_id"], "env") & SEED_MASK)
        for task in ordered_tasks[:max_tasks]
    ]


def hash_json(value: object, digest_size: int = 8) -> str:
    """Return a hash of ``digest_size`` bytes, as hexadecimal digits, of ``value`` as JSON.

    The order of the keys of dictionaries has no effect.
    """
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=digest_size).hexdigest()


def check_tasks(tasks: Sequence[Task], split: str) -> None:
    """Raise ``ValueError`` for a task of ``split`` that is not as ``Task`` describes it."""
    task_ids: set[str] = set()
    for task in tasks:
        if not isinstance(task, dict) or not all(
            isinstance(task.get(key), str) for key in ("task_id", "data_source")
        ):
            raise UserError(
                f"a task of split {split!r} is {str(task)[:200]}; allowed: a dict with the "
                "strings task_id and data_source; fix: correct the function tasks of the package",
                "failed_call",
            )
        try:
            wire.encode(task)  # the pool encodes tasks like this for its worker processes
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(
                f"task {task['task_id']!r} of split {split!r} cannot be sent as JSON: {error}; "
                "allowed: texts, numbers, booleans, null, lists, dicts and NumPy arrays; fix: "
                "convert its values in the function tasks",
                "failed_call",
            ) from error
        task_ids.add(task["task_id"])
    if len(task_ids) < len(tasks):
        raise UserError(
            f"{len(tasks) - len(task_ids)} of {len(tasks)} tasks of split {split!r} have the "
            "task_id of another task; allowed: unique ids; fix: correct the function tasks of the "
            "package",
            "failed_call",
        )


def make_task_ids_unique(tasks: Iterable[Task]) -> list[Task]:
    """Return ``tasks`` with unique ids: the second task with the id ``a`` gets the id ``a#2``."""
    count_by_id: Counter[str] = Counter()
    numbered_tasks: list[Task] = []
    for task in tasks:
        task_id = task["task_id"]
        count_by_id[task_id] += 1
        suffix = f"#{count_by_id[task_id]}" if count_by_id[task_id] > 1 else ""
        numbered_tasks.append({**task, "task_id": f"{task_id}{suffix}"})
    return numbered_tasks


def check_disjoint_splits(train_tasks: Sequence[Task], val_tasks: Sequence[Task]) -> None:
    """Raise ``ValueError`` for a task id that is in both splits."""
    ids_of_splits = ({task["task_id"] for task in tasks} for tasks in (train_tasks, val_tasks))
    common_ids = sorted(set.intersection(*ids_of_splits))
    if common_ids:
        raise UserError(
            f"{len(common_ids)} tasks are in both train and val, the first: {common_ids[0]!r}; "
            "allowed: disjoint splits; fix: remove these tasks from one of the splits",
            "wrong_cell",
        )


class GroupMismatch(RuntimeError):
    """Error for a group whose members have different start states.

    Their returns cannot be compared.
    """


def assert_same_start_states(
    uids: Sequence[str], start_states: Sequence[tuple[str, str] | None]
) -> None:
    """Raise ``GroupMismatch`` unless rows with the same uid have the same start state.

    A start state is (text, state) of the first observation, or None for a row whose reset failed.
    """
    start_state_by_uid: dict[str, tuple[str, str]] = {}
    for uid, start_state in zip(uids, start_states, strict=True):
        if start_state is None:
            continue
        # Comparing with the first member is enough: equality is transitive.
        expected_start_state = start_state_by_uid.setdefault(uid, start_state)
        if expected_start_state != start_state:
            raise GroupMismatch(
                f"members of group {uid} started from different states: "
                f"{expected_start_state[0][:200]!r} and {start_state[0][:200]!r}; fix: make reset "
                "depend on task and seed only"
            )
