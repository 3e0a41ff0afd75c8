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
from functools import partial
from operator import itemgetter
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


def collect_registered_methods(worker_cls: type) -> dict[str, Registration]:
    """Return the registrations of a class's group methods by name, including inherited ones.

    An override without ``register`` keeps the registration of the method that it overrides.
    """
    return {
        name: getattr(member, _REGISTRATION_ATTRIBUTE)
        for cls in reversed(worker_cls.__mro__)
        for name, member in vars(cls).items()
        if hasattr(member, _REGISTRATION_ATTRIBUTE)
    }


def plan_calls(
    registration: Registration, world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Plan:
    """Return the calls of ranks 0, 1, ... and the function that combines their results.

    The list has one call if only rank 0 executes. Raises ``ValueError`` if the arguments cannot be
    dispatched to ``world_size`` ranks.
    """
    mode = registration.dispatch_mode
    if mode is Dispatch.DP_COMPUTE_PROTO:
        return _plan_dp_compute_proto(world_size, args, kwargs)
    named = {**{f"argument {i}": value for i, value in enumerate(args)}, **kwargs}
    # DP_COMPUTE accepts tuples too. ALL_TO_ALL splits lists only, as in verl.
    entry_types = (list, tuple) if mode is Dispatch.DP_COMPUTE else list
    whole_names = [
        name
        for name, value in named.items()
        if not isinstance(value, entry_types) or len(value) != world_size
    ]
    if mode is Dispatch.DP_COMPUTE and whole_names:
        raise ValueError(
            f"DP_COMPUTE needs lists with one entry for each of {world_size} ranks; "
            f"these arguments are not: {whole_names}"
        )
    if mode in (Dispatch.DP_COMPUTE, Dispatch.ALL_TO_ALL) and not whole_names:
        calls = _split_by_rank(world_size, args, kwargs)
    else:
        calls = [(args, kwargs)] * world_size
    if mode is Dispatch.RANK_ZERO or registration.execute_mode is Execute.RANK_ZERO:
        return calls[:1], itemgetter(0)
    return calls, list


def _split_by_rank(world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Call]:
    return [
        (
            tuple(values[rank] for values in args),
            {name: values[rank] for name, values in kwargs.items()},
        )
        for rank in range(world_size)
    ]


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
    calls = _split_by_rank(world_size, tuple(sharded_args), sharded_kwargs)
    if counts is not None:
        return calls, partial(_join_by_counts, counts=counts)
    return calls, partial(_join_padded, size=size, padding=-size % world_size)


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
    """Return the rows of ``answers`` without those of the ranks that have no rows."""
    if not all(isinstance(answer, DataProto) for answer in answers):
        return answers
    if all(answer.keys() for answer in answers):
        for answer, count in zip(answers, counts, strict=True):
            if len(answer) != max(1, count):
                raise ValueError(
                    f"a worker returned {len(answer)} rows for a shard of {count} rows"
                )
        with_rows = [answer for answer, count in zip(answers, counts, strict=True) if count]
        answers = with_rows or answers[:1]
    return _join_tables(answers)


def _join_padded(answers: list[Any], size: int, padding: int) -> Any:
    """Return the rows of ``answers`` without the last ``padding`` rows."""
    if not all(isinstance(answer, DataProto) for answer in answers):
        return answers
    joined_table = _join_tables(answers)
    # A result with meta_info only has no padding rows to remove.
    if not padding or not joined_table.keys():
        return joined_table
    if len(joined_table) != size + padding:
        raise ValueError(
            f"{size} rows were padded with {padding} rows to split them evenly, but the workers "
            f"returned {len(joined_table)} rows in total, so the padding rows cannot be removed"
        )
    return unpad_dataproto(joined_table, padding)


def _join_tables(tables: list[DataProto]) -> DataProto:
    joined_table = DataProto.concat(tables)
    joined_table.meta_info.pop(PADDING_ROWS, None)
    return joined_table
