"""Dispatch of the arguments of a group call to the ranks, and collection of the ranks' results.

================  ==========================================  ==================================
mode              rank i receives                             the caller receives
================  ==========================================  ==================================
ONE_TO_ALL        all arguments                               list of the ranks' results
ALL_TO_ALL        entry i of each argument when all are       list of the ranks' results
                  lists of world_size entries, otherwise all
                  arguments
DP_COMPUTE        entry i of each argument; each must be a    list of the ranks' results
                  list of world_size entries
DP_COMPUTE_PROTO  its shard of every ``DataProto``, other     one ``DataProto`` with the rows in
                  arguments unchanged                         order, or the list of results if
                                                              not all are ``DataProto``
RANK_ZERO         rank 0 alone: all arguments                 rank 0's result
================  ==========================================  ==================================

DP_COMPUTE_PROTO pads a ``DataProto`` with repeated rows to a multiple of the world size, and drops
these rows from the result. If ``meta_info["rows_per_rank"]`` is present, it gives the number of
rows of each rank. A rank without rows then gets a copy of the first row. ``meta_info
["padding_rows"]`` of a shard is the number of its padding rows, which are its last rows. A worker
that sums over rows (a loss, a metric) must exclude them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeVar

import numpy as np

from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto

# Key of meta_info: number of padding rows at the end of the shard.
PADDING_ROWS = "padding_rows"
# Key of meta_info: number of rows of each rank, in rank order. Absent: equal numbers.
ROWS_PER_RANK = "rows_per_rank"
_REGISTRATION_ATTRIBUTE = "__group_registration__"

Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments of one rank
Collect = Callable[[list[Any]], Any]  # results in rank order -> what the caller receives
Plan = tuple[list[Call], Collect]
MethodT = TypeVar("MethodT", bound=Callable[..., Any])


class Dispatch(Enum):
    """Dispatch mode: the arguments of each rank; see the module docstring."""

    ONE_TO_ALL = auto()
    DP_COMPUTE_PROTO = auto()
    RANK_ZERO = auto()  # this mode and the two below are kept for workers written for verl
    ALL_TO_ALL = auto()
    DP_COMPUTE = auto()


class Execute(Enum):
    """Ranks that run the call. Kept for verl workers, which use it for methods of rank 0."""

    ALL = auto()
    RANK_ZERO = auto()


@dataclass(frozen=True)
class Registration:
    """Options of a registered method. ``timeout_s`` None means the group's ``call_timeout_s``."""

    dispatch_mode: Dispatch = Dispatch.ALL_TO_ALL
    execute_mode: Execute = Execute.ALL
    blocking: bool = True
    timeout_s: float | None = None


def register(
    dispatch_mode: Dispatch = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    timeout_s: float | None = None,
) -> Callable[[MethodT], MethodT]:
    """Make a worker's method callable on its ``WorkerGroup``. Coroutines are awaited in the worker.

    The method itself is not changed. With ``blocking=False`` the group call returns a
    ``GroupFuture`` at once. Raises ``ValueError`` if ``Execute.RANK_ZERO`` is combined with a
    dispatch mode that splits the data over all ranks.
    """
    splits_data = dispatch_mode in (
        Dispatch.ALL_TO_ALL,
        Dispatch.DP_COMPUTE,
        Dispatch.DP_COMPUTE_PROTO,
    )
    if execute_mode is Execute.RANK_ZERO and splits_data:
        raise ValueError(
            f"dispatch_mode={dispatch_mode.name} splits the data over all ranks, so a call cannot "
            "execute on rank 0 only; fix: execute_mode=ALL, or dispatch_mode=RANK_ZERO"
        )
    registration = Registration(dispatch_mode, execute_mode, blocking, timeout_s)

    def attach_registration(method: MethodT) -> MethodT:
        setattr(method, _REGISTRATION_ATTRIBUTE, registration)
        return method

    return attach_registration


def get_registration(method: object) -> Registration | None:
    """Return the registration of ``method``, or None if it is not registered."""
    return getattr(method, _REGISTRATION_ATTRIBUTE, None)


def collect_registered_methods(worker_cls: type) -> dict[str, Registration]:
    """Return the registrations of a class's group methods by name, including inherited ones.

    An override without ``register`` keeps the registration of the method that it overrides.
    """
    registrations: dict[str, Registration] = {}
    for cls in reversed(worker_cls.__mro__):
        class_registrations = {name: get_registration(member) for name, member in vars(cls).items()}
        registrations.update(
            {
                name: registration
                for name, registration in class_registrations.items()
                if registration
            }
        )
    return registrations


def plan_calls(
    registration: Registration, world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Plan:
    """Return the calls of ranks 0, 1, ... and the function that combines their results.

    The list has one call if only rank 0 executes. Raises ``ValueError`` if the arguments cannot be
    dispatched to ``world_size`` ranks.
    """
    calls, collect = _PLANNERS[registration.dispatch_mode](world_size, args, kwargs)
    if registration.execute_mode is Execute.RANK_ZERO:
        return calls[:1], _take_first
    return calls, collect


def _take_first(answers: list[Any]) -> Any:
    return answers[0]


def _plan_one_to_all(world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    return [(args, kwargs)] * world_size, list


def _plan_rank_zero(_world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    return [(args, kwargs)], _take_first


def _has_one_per_rank(value: object, world_size: int) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == world_size


def _split_by_rank(world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Call]:
    calls: list[Call] = []
    for rank in range(world_size):
        rank_args = tuple(values[rank] for values in args)
        calls.append((rank_args, {name: values[rank] for name, values in kwargs.items()}))
    return calls


def _plan_all_to_all(world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    if all(isinstance(v, list) and len(v) == world_size for v in (*args, *kwargs.values())):
        return _split_by_rank(world_size, args, kwargs), list
    return _plan_one_to_all(world_size, args, kwargs)


def _plan_dp_compute(world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    named = {**{f"argument {i}": v for i, v in enumerate(args)}, **kwargs}
    bad_names = [name for name, value in named.items() if not _has_one_per_rank(value, world_size)]
    if bad_names:
        raise ValueError(
            f"DP_COMPUTE needs lists with one entry for each of {world_size} ranks; "
            f"these arguments are not: {bad_names}"
        )
    return _split_by_rank(world_size, args, kwargs), list


def _plan_dp_compute_proto(world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    tables = [v for v in (*args, *kwargs.values()) if isinstance(v, DataProto)]
    # A DataProto without columns has no rows to split. Every rank gets its meta_info.
    sizes = {len(table) for table in tables if table.keys()}
    if not tables or len(sizes) > 1:
        problem = f"tables of {sorted(sizes)} rows" if tables else "no DataProto"
        raise ValueError(
            f"DP_COMPUTE_PROTO needs DataProto arguments, all with the same number of rows; "
            f"the arguments have {problem}"
        )
    size = sizes.pop() if sizes else 0
    counts = _read_rows_per_rank(tables, size, world_size)
    sharded_args = [_split_value(v, world_size, counts) for v in args]
    sharded_kwargs = {k: _split_value(v, world_size, counts) for k, v in kwargs.items()}

    def collect(answers: list[Any]) -> Any:
        if counts is not None:
            return _join_by_counts(answers, counts)
        return _join_tables(answers, size, -size % world_size)

    return _split_by_rank(world_size, tuple(sharded_args), sharded_kwargs), collect


def _read_rows_per_rank(tables: list[DataProto], size: int, world_size: int) -> list[int] | None:
    """Return the row count of each rank if an argument has ``rows_per_rank``, else None."""
    given_counts = [
        table.meta_info[ROWS_PER_RANK] for table in tables if ROWS_PER_RANK in table.meta_info
    ]
    if not given_counts:
        return None
    counts = list(given_counts[0])
    if any(list(table_counts) != counts for table_counts in given_counts[1:]):
        raise ValueError(f"the tables of one call have different {ROWS_PER_RANK}: {given_counts}")
    if len(counts) != world_size or sum(counts) != size or min(counts) < 0:
        raise ValueError(
            f"{ROWS_PER_RANK}={counts} does not split {size} rows over {world_size} ranks; "
            f"allowed: {world_size} counts of at least 0 with the sum {size}"
        )
    return counts


def _split_value(value: object, world_size: int, counts: list[int] | None) -> list[Any]:
    if not isinstance(value, DataProto):
        return [value] * world_size
    if counts is not None and value.keys():
        return _split_by_counts(value, counts)
    # Pad with copied rows: a rank without rows could not join the collectives. The number of
    # padding rows of each shard is stored below.
    padded, padding = pad_dataproto_to_divisor(value, world_size)
    rows = len(padded) // world_size
    shards = padded.chunk(world_size)
    for rank, shard in enumerate(shards):
        later_rows = (world_size - 1 - rank) * rows  # rows of the ranks after this one
        shard.meta_info[PADDING_ROWS] = int(np.clip(padding - later_rows, 0, rows))
    return shards


def _split_by_counts(table: DataProto, counts: list[int]) -> list[DataProto]:
    shards: list[DataProto] = []
    start = 0
    for count in counts:
        # Copy a row for a rank without rows: otherwise it could not join the collectives.
        shard = table[start : start + count] if count else table[:1]
        shard.meta_info.pop(ROWS_PER_RANK, None)
        shard.meta_info[PADDING_ROWS] = int(not count)
        shards.append(shard)
        start += count
    return shards


def _join_by_counts(answers: list[Any], counts: list[int]) -> Any:
    if not all(isinstance(answer, DataProto) for answer in answers):
        return answers
    if all(answer.keys() for answer in answers):
        pairs = list(zip(answers, counts, strict=True))
        wrong_row_counts = [
            (len(answer), count) for answer, count in pairs if len(answer) != max(1, count)
        ]
        if wrong_row_counts:
            raise ValueError(
                f"a worker returned {wrong_row_counts[0][0]} rows for a shard of "
                f"{wrong_row_counts[0][1]} rows"
            )
        answers = [answer for answer, count in pairs if count] or answers[:1]
    joined_table = DataProto.concat(answers)
    joined_table.meta_info.pop(PADDING_ROWS, None)
    return joined_table


def _join_tables(answers: list[Any], size: int, padding: int) -> Any:
    if not all(isinstance(answer, DataProto) for answer in answers):
        return answers
    joined_table = DataProto.concat(answers)
    joined_table.meta_info.pop(PADDING_ROWS, None)
    # A result with meta_info only has no padding rows to remove.
    if not padding or not joined_table.keys():
        return joined_table
    if len(joined_table) != size + padding:
        raise ValueError(
            f"{size} rows were padded with {padding} rows to split them evenly, but the workers "
            f"returned {len(joined_table)} rows in total, so the padding rows cannot be removed"
        )
    return unpad_dataproto(joined_table, padding)


_PLANNERS: dict[Dispatch, Callable[[int, tuple[Any, ...], dict[str, Any]], Plan]] = {
    Dispatch.RANK_ZERO: _plan_rank_zero,
    Dispatch.ONE_TO_ALL: _plan_one_to_all,
    Dispatch.ALL_TO_ALL: _plan_all_to_all,
    Dispatch.DP_COMPUTE: _plan_dp_compute,
    Dispatch.DP_COMPUTE_PROTO: _plan_dp_compute_proto,
}
