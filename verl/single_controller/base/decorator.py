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
rows of each rank. A rank without rows then gets a copy of the first row. The value
``meta_info["padding_rows"]`` of a shard is the number of its padding rows, which are its last rows.
A worker that sums over rows (a loss, a metric) must exclude them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from operator import itemgetter
from typing import Any, TypeVar

from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto

# Key of meta_info: number of padding rows at the end of the shard.
PADDING_ROWS = "padding_rows"
# Key of meta_info: number of rows of each rank, in rank order. Without it all shares are equal.
ROWS_PER_RANK = "rows_per_rank"
_REGISTRATION_ATTRIBUTE = "__group_registration__"

Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments of one rank
Collect = Callable[[list[Any]], Any]  # list of the ranks' results -> result of the group call
CallPlan = tuple[list[Call], Collect]  # calls of the ranks, and the function that joins results
MethodT = TypeVar("MethodT", bound=Callable[..., Any])


class Dispatch(Enum):
    """Dispatch mode of a method: how arguments are divided over ranks, and results combined."""

    ONE_TO_ALL = auto()
    DP_COMPUTE_PROTO = auto()
    # The following modes are kept for workers written for verl.
    RANK_ZERO = auto()
    ALL_TO_ALL = auto()
    DP_COMPUTE = auto()


class Execute(Enum):
    """Ranks that run a registered method: all, or rank 0 only (for workers written for verl)."""

    ALL = auto()
    RANK_ZERO = auto()


@dataclass(frozen=True)
class MethodRegistration:
    """Options of a worker method, as given to ``register``."""

    dispatch_mode: Dispatch = Dispatch.ALL_TO_ALL
    execute_mode: Execute = Execute.ALL
    blocking: bool = True


def register(
    dispatch_mode: Dispatch = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
) -> Callable[[MethodT], MethodT]:
    """Make a worker's method callable on its ``WorkerGroup``. Coroutines are awaited in the worker.

    With ``blocking=False`` the group call returns a ``GroupFuture`` at once. Raises ``ValueError``
    if ``Execute.RANK_ZERO`` is combined with a dispatch mode that splits the data over all ranks.
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
    registration = MethodRegistration(dispatch_mode, execute_mode, blocking)

    def attach_registration(method: MethodT) -> MethodT:
        setattr(method, _REGISTRATION_ATTRIBUTE, registration)
        return method

    return attach_registration


def collect_registered_methods(worker_cls: type) -> dict[str, MethodRegistration]:
    """Return a dict method name -> registration of the registered methods of ``worker_cls``.

    Inherited methods are included. A method without ``register`` that overrides a registered one
    has the registration of the overridden method.
    """
    return {
        name: getattr(member, _REGISTRATION_ATTRIBUTE)
        for cls in reversed(worker_cls.__mro__)
        for name, member in vars(cls).items()
        if hasattr(member, _REGISTRATION_ATTRIBUTE)
    }


def plan_calls(
    registration: MethodRegistration, world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> CallPlan:
    """Return the arguments for each rank, and the function that combines the ranks' results.

    The list has one entry if only rank 0 executes the method. Raises ``ValueError`` if the
    arguments cannot be dispatched to ``world_size`` ranks.
    """
    mode = registration.dispatch_mode
    if mode is Dispatch.DP_COMPUTE_PROTO:
        return _plan_dp_compute_proto(world_size, args, kwargs)
    values_by_name = {**{f"argument {i}": value for i, value in enumerate(args)}, **kwargs}
    # DP_COMPUTE splits lists and tuples. ALL_TO_ALL splits only lists, as in verl.
    splittable_types = (list, tuple) if mode is Dispatch.DP_COMPUTE else list
    indivisible_names = [
        name
        for name, value in values_by_name.items()
        if not isinstance(value, splittable_types) or len(value) != world_size
    ]
    if mode is Dispatch.DP_COMPUTE and indivisible_names:
        raise ValueError(
            f"DP_COMPUTE needs lists with one entry for each of {world_size} ranks; "
            f"these arguments are not: {indivisible_names}"
        )
    if mode in (Dispatch.DP_COMPUTE, Dispatch.ALL_TO_ALL) and not indivisible_names:
        calls = _split_by_rank(world_size, args, kwargs)
    else:
        calls = [(args, kwargs)] * world_size
    if mode is Dispatch.RANK_ZERO or registration.execute_mode is Execute.RANK_ZERO:
        return calls[:1], itemgetter(0)
    return calls, list


def _split_by_rank(world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Call]:
    return [
        (
            tuple(rank_values[rank] for rank_values in args),
            {name: rank_values[rank] for name, rank_values in kwargs.items()},
        )
        for rank in range(world_size)
    ]


def _plan_dp_compute_proto(
    world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> CallPlan:
    tables = [value for value in (*args, *kwargs.values()) if isinstance(value, DataProto)]
    # Skip tables without columns: they have no rows to split, and every rank gets their meta_info.
    row_counts = {len(table) for table in tables if table.keys()}
    if not tables or len(row_counts) > 1:
        problem = f"tables of {sorted(row_counts)} rows" if tables else "no DataProto"
        raise ValueError(
            f"DP_COMPUTE_PROTO needs DataProto arguments, all with the same number of rows; "
            f"the arguments have {problem}"
        )
    num_rows = row_counts.pop() if row_counts else 0
    rows_per_rank = _read_rows_per_rank(tables, num_rows, world_size)
    sharded_args = [_split_argument(value, world_size, rows_per_rank) for value in args]
    sharded_kwargs = {
        k: _split_argument(value, world_size, rows_per_rank) for k, value in kwargs.items()
    }
    calls = _split_by_rank(world_size, tuple(sharded_args), sharded_kwargs)
    if rows_per_rank is not None:
        return calls, partial(_join_without_empty_ranks, rows_per_rank=rows_per_rank)
    return calls, partial(_join_without_padding, num_rows=num_rows, padding=-num_rows % world_size)


def _read_rows_per_rank(
    tables: list[DataProto], num_rows: int, world_size: int
) -> list[int] | None:
    row_counts_of_tables = [
        table.meta_info[ROWS_PER_RANK] for table in tables if ROWS_PER_RANK in table.meta_info
    ]
    if not row_counts_of_tables:
        return None
    row_counts = list(row_counts_of_tables[0])
    if any(list(table_counts) != row_counts for table_counts in row_counts_of_tables[1:]):
        raise ValueError(
            f"the tables of one call have different {ROWS_PER_RANK}: {row_counts_of_tables}"
        )
    if len(row_counts) != world_size or sum(row_counts) != num_rows or min(row_counts) < 0:
        raise ValueError(
            f"{ROWS_PER_RANK}={row_counts} does not split {num_rows} rows over {world_size} ranks; "
            f"allowed: {world_size} counts of at least 0 with the sum {num_rows}"
        )
    return row_counts


def _split_argument(value: object, world_size: int, rows_per_rank: list[int] | None) -> list[Any]:
    if not isinstance(value, DataProto):
        return [value] * world_size
    if rows_per_rank is not None and value.keys():
        return _split_by_counts(value, rows_per_rank)
    # Pad with copied rows: a rank without rows could not take part in collective operations.
    padded_table, total_padding = pad_dataproto_to_divisor(value, world_size)
    rows_per_shard = len(padded_table) // world_size
    shards = padded_table.chunk(world_size)
    for rank, shard in enumerate(shards):
        rows_of_later_ranks = (world_size - 1 - rank) * rows_per_shard
        num_padding = min(max(total_padding - rows_of_later_ranks, 0), rows_per_shard)
        shard.meta_info[PADDING_ROWS] = num_padding
    return shards


def _split_by_counts(table: DataProto, rows_per_rank: list[int]) -> list[DataProto]:
    shards: list[DataProto] = []
    first_row = 0
    for num_rows in rows_per_rank:
        # Give a rank without rows a copy of the first row: it must take part in collectives.
        shard = table[first_row : first_row + num_rows] if num_rows else table[:1]
        shard.meta_info.pop(ROWS_PER_RANK, None)
        shard.meta_info[PADDING_ROWS] = int(not num_rows)
        shards.append(shard)
        first_row += num_rows
    return shards


def _join_without_empty_ranks(results: list[Any], rows_per_rank: list[int]) -> Any:
    """Concatenate the ranks' ``results``, except those of ranks with 0 in ``rows_per_rank``.

    Such a rank computed only a padding row. Results that are not all ``DataProto`` are returned as
    a list.
    """
    if not all(isinstance(result, DataProto) for result in results):
        return results
    if all(result.keys() for result in results):
        for result, num_rows in zip(results, rows_per_rank, strict=True):
            if len(result) != max(1, num_rows):
                raise ValueError(
                    f"a worker returned {len(result)} rows for a shard of {num_rows} rows"
                )
        results_with_rows = [
            result for result, num_rows in zip(results, rows_per_rank, strict=True) if num_rows
        ]
        results = results_with_rows or results[:1]
    return _join_tables(results)


def _join_without_padding(results: list[Any], num_rows: int, padding: int) -> Any:
    """Concatenate the ranks' ``results`` and remove the last ``padding`` rows."""
    if not all(isinstance(result, DataProto) for result in results):
        return results
    joined_table = _join_tables(results)
    # A table that has only meta_info has no padding rows to remove.
    if not padding or not joined_table.keys():
        return joined_table
    if len(joined_table) != num_rows + padding:
        raise ValueError(
            f"{num_rows} rows were padded with {padding} rows to split them evenly, but the "
            f"workers returned {len(joined_table)} rows in total, so the padding rows cannot be "
            "removed"
        )
    return unpad_dataproto(joined_table, padding)


def _join_tables(tables: list[DataProto]) -> DataProto:
    joined_table = DataProto.concat(tables)
    joined_table.meta_info.pop(PADDING_ROWS, None)
    return joined_table
