"""How the arguments of a group call are dealt to the ranks, and how their answers become one value.

================  ==========================================  ==================================
mode              rank i receives                             the caller receives
================  ==========================================  ==================================
ONE_TO_ALL        all arguments                               list of the ranks' answers
ALL_TO_ALL        entry i of each argument when all are       list of the ranks' answers
                  lists of world_size entries, otherwise all
                  arguments
DP_COMPUTE        entry i of each argument; each must be a    list of the ranks' answers
                  list of world_size entries
DP_COMPUTE_PROTO  its rows of every ``DataProto``, other      one ``DataProto`` with the rows in
                  arguments as they are                       order, or the list of answers if
                                                              they are no tables
RANK_ZERO         rank 0 alone: all arguments                 rank 0's answer
================  ==========================================  ==================================

DP_COMPUTE_PROTO pads the table to a multiple of the world size with repeated rows and drops them
from the answer; a table whose ``meta_info["rows_per_rank"]`` says how many rows each rank gets is
cut there, and a rank without any gets a copy. Each shard says in ``meta_info["padding_rows"]`` how
many of its last rows are such copies, so that a worker which sums over rows (a loss, a metric) can
leave them out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeVar

import numpy as np

from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto

# Key of meta_info: how many of the last rows are copies that only even out the ranks.
PADDING_ROWS = "padding_rows"
# Key of meta_info: how many rows of the table each rank gets, in order; absent: all as many.
ROWS_PER_RANK = "rows_per_rank"
_ATTRIBUTE = "__group_registration__"

Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments of one rank
Collect = Callable[[list[Any]], Any]  # answers in rank order -> what the caller receives
Plan = tuple[list[Call], Collect]
MethodT = TypeVar("MethodT", bound=Callable[..., Any])


class Dispatch(Enum):
    """Which arguments each rank receives; see the module docstring."""

    ONE_TO_ALL = auto()
    DP_COMPUTE_PROTO = auto()
    RANK_ZERO = auto()  # kept for workers written against the usual modes, like the two below
    ALL_TO_ALL = auto()
    DP_COMPUTE = auto()


class Execute(Enum):
    """Which ranks run the call. Kept for workers that register methods of rank 0 this way."""

    ALL = auto()
    RANK_ZERO = auto()


@dataclass(frozen=True)
class Registration:
    """What ``register`` notes on a method. ``timeout_s`` None leaves the deadline to the group."""

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
    """Make a worker's method callable on the group; a coroutine method is awaited in the worker.

    The method itself is left as it is. With ``blocking=False`` the group call returns a
    ``GroupFuture`` at once. Raises ``ValueError`` when rank 0 alone is to execute a call whose data
    are split over all ranks.
    """
    splits = dispatch_mode in (Dispatch.ALL_TO_ALL, Dispatch.DP_COMPUTE, Dispatch.DP_COMPUTE_PROTO)
    if execute_mode is Execute.RANK_ZERO and splits:
        raise ValueError(
            f"{dispatch_mode.name} deals the data to all ranks; it cannot execute on rank 0 alone"
        )
    registration = Registration(dispatch_mode, execute_mode, blocking, timeout_s)

    def mark(method: MethodT) -> MethodT:
        setattr(method, _ATTRIBUTE, registration)
        return method

    return mark


def registration_of(method: object) -> Registration | None:
    """What ``register`` noted on ``method``, or None."""
    return getattr(method, _ATTRIBUTE, None)


def registered_methods(worker_cls: type) -> dict[str, Registration]:
    """Names and registrations of the group methods of a class, those of its bases included.

    An override that carries no ``register`` of its own keeps the registration of the method it
    overrides.
    """
    found: dict[str, Registration] = {}
    for cls in reversed(worker_cls.__mro__):
        marked = {name: registration_of(member) for name, member in vars(cls).items()}
        found.update({name: registration for name, registration in marked.items() if registration})
    return found


def plan_calls(
    registration: Registration, world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Plan:
    """The calls of ranks 0, 1, ... (rank 0 alone gets a list of one) and the function that joins
    their answers.

    Raises ``ValueError`` when the arguments cannot be dealt to ``world_size`` ranks.
    """
    calls, collect = _PLANNERS[registration.dispatch_mode](world_size, args, kwargs)
    if registration.execute_mode is Execute.RANK_ZERO:
        return calls[:1], _first
    return calls, collect


def _first(answers: list[Any]) -> Any:
    return answers[0]


def _one_to_all(world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    return [(args, kwargs)] * world_size, list


def _rank_zero(_world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    return [(args, kwargs)], _first


def _has_one_per_rank(value: object, world_size: int) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == world_size


def _dealt(world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Call]:
    calls: list[Call] = []
    for rank in range(world_size):
        of_rank = tuple(values[rank] for values in args)
        calls.append((of_rank, {name: values[rank] for name, values in kwargs.items()}))
    return calls


def _all_to_all(world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    if all(isinstance(v, list) and len(v) == world_size for v in (*args, *kwargs.values())):
        return _dealt(world_size, args, kwargs), list
    return _one_to_all(world_size, args, kwargs)


def _dp_compute(world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    named = {**{f"argument {i}": v for i, v in enumerate(args)}, **kwargs}
    wrong = [name for name, value in named.items() if not _has_one_per_rank(value, world_size)]
    if wrong:
        raise ValueError(
            f"DP_COMPUTE needs lists with one entry for each of {world_size} ranks; not so: {wrong}"
        )
    return _dealt(world_size, args, kwargs), list


def _dp_compute_proto(world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    tables = [v for v in (*args, *kwargs.values()) if isinstance(v, DataProto)]
    # A table without columns has no rows to deal; it brings its meta_info to every rank.
    sizes = {len(table) for table in tables if table.keys()}
    if not tables or len(sizes) > 1:
        found = f"tables of {sorted(sizes)} rows" if tables else "no DataProto"
        raise ValueError(
            f"DP_COMPUTE_PROTO needs tables of one length among its arguments, found {found}"
        )
    size = sizes.pop() if sizes else 0
    counts = _rows_per_rank(tables, size, world_size)
    dealt_args = [_shards(v, world_size, counts) for v in args]
    dealt_kwargs = {k: _shards(v, world_size, counts) for k, v in kwargs.items()}

    def collect(answers: list[Any]) -> Any:
        if counts is not None:
            return _join_counted(answers, counts)
        return _join_tables(answers, size, -size % world_size)

    return _dealt(world_size, tuple(dealt_args), dealt_kwargs), collect


def _rows_per_rank(tables: list[DataProto], size: int, world_size: int) -> list[int] | None:
    """How many rows each rank gets, where a table says so."""
    said = [table.meta_info[ROWS_PER_RANK] for table in tables if ROWS_PER_RANK in table.meta_info]
    if not said:
        return None
    counts = list(said[0])
    if any(list(other) != counts for other in said[1:]):
        raise ValueError(f"the tables of one call say different {ROWS_PER_RANK}: {said}")
    if len(counts) != world_size or sum(counts) != size or min(counts) < 0:
        raise ValueError(
            f"{ROWS_PER_RANK}={counts} does not deal {size} rows to {world_size} ranks"
        )
    return counts


def _shards(value: object, world_size: int, counts: list[int] | None) -> list[Any]:
    if not isinstance(value, DataProto):
        return [value] * world_size
    if counts is not None and value.keys():
        return _counted_shards(value, counts)
    # Copied rows, marked below: a rank without rows could not join the collective calls.
    padded, padding = pad_dataproto_to_divisor(value, world_size)
    rows = len(padded) // world_size
    shards = padded.chunk(world_size)
    for rank, shard in enumerate(shards):
        behind = (world_size - 1 - rank) * rows  # rows of the ranks after this one
        shard.meta_info[PADDING_ROWS] = int(np.clip(padding - behind, 0, rows))
    return shards


def _counted_shards(table: DataProto, counts: list[int]) -> list[DataProto]:
    shards: list[DataProto] = []
    start = 0
    for count in counts:
        # A copied row where a rank has none: without it, it could not join the collective calls.
        shard = table[start : start + count] if count else table[:1]
        shard.meta_info.pop(ROWS_PER_RANK, None)
        shard.meta_info[PADDING_ROWS] = int(not count)
        shards.append(shard)
        start += count
    return shards


def _join_counted(answers: list[Any], counts: list[int]) -> Any:
    if not all(isinstance(answer, DataProto) for answer in answers):
        return answers
    if all(answer.keys() for answer in answers):
        pairs = list(zip(answers, counts, strict=True))
        wrong = [(len(answer), count) for answer, count in pairs if len(answer) != max(1, count)]
        if wrong:
            raise ValueError(f"a worker returned {wrong[0][0]} rows for {wrong[0][1]} of its own")
        answers = [answer for answer, count in pairs if count] or answers[:1]
    joined = DataProto.concat(answers)
    joined.meta_info.pop(PADDING_ROWS, None)
    return joined


def _join_tables(answers: list[Any], size: int, padding: int) -> Any:
    if not all(isinstance(answer, DataProto) for answer in answers):
        return answers
    joined = DataProto.concat(answers)
    joined.meta_info.pop(PADDING_ROWS, None)
    # An answer of figures alone has no rows of which padding could be cut off.
    if not padding or not joined.keys():
        return joined
    if len(joined) != size + padding:
        raise ValueError(
            f"{size} rows were padded with {padding} to split them evenly, but the workers "
            f"returned {len(joined)} rows in all; which of them are padding cannot be told"
        )
    return unpad_dataproto(joined, padding)


_PLANNERS: dict[Dispatch, Callable[[int, tuple[Any, ...], dict[str, Any]], Plan]] = {
    Dispatch.RANK_ZERO: _rank_zero,
    Dispatch.ONE_TO_ALL: _one_to_all,
    Dispatch.ALL_TO_ALL: _all_to_all,
    Dispatch.DP_COMPUTE: _dp_compute,
    Dispatch.DP_COMPUTE_PROTO: _dp_compute_proto,
}
