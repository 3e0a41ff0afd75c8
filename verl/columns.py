"""Columns of a ``DataProto``: allowed contents, comparison, concatenation and serialisation.

Pickling turns tensors into numpy buffers (``tensor_to_buffer``), which Ray's object store transfers
out of band.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

# Bytes per element -> integer dtype. It replaces a dtype that numpy lacks, such as bfloat16.
_INTEGER_DTYPES = {1: torch.uint8, 2: torch.int16}
# Key of meta_info: column -> dtype that the column gets again in the receiving process.
RESTORED_DTYPES = "restored_dtypes"

METRICS = "metrics"  # key of meta_info: metrics of a table; concat collects them in lists


# ---- construction ------------------------------------------------------------------------------


def object_array(values: Iterable[object]) -> np.ndarray:
    """Return a one-dimensional object array of ``values``, which may be lists of equal length."""
    values = list(values)
    # np.array(values, dtype=object) would make a matrix of lists of equal length.
    array = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        array[i] = value
    return array


def as_column(key: str, values: object) -> np.ndarray:
    """Return ``values``, one value per row, as an array [B].

    An array is returned unchanged. Another iterable becomes an object array. Raises ``TypeError``
    for a string, a dict or a scalar, and ``ValueError`` for an array of shape ``()``.
    """
    if isinstance(values, np.ndarray):
        column = values
    elif isinstance(values, (str, bytes, dict)) or not isinstance(values, Iterable):
        column_name = f"non_tensor_batch[{key!r}]"
        raise TypeError(f"{column_name} must be an array or a list of B values, got {type(values)}")
    else:
        column = object_array(values)
    if column.ndim == 0:
        raise ValueError(f"non_tensor_batch[{key!r}] is a scalar; it needs one value per row")
    return column


def collate_fn(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Turn row dicts into columns for ``DataProto.from_single_dict``.

    Tensors are stacked to [B, ...], everything else becomes an object array [B]. Raises
    ``KeyError`` if the rows have different keys, and ``ValueError`` without rows.
    """
    if not samples:
        raise ValueError("collate_fn: no samples")
    keys = list(samples[0])
    for i, sample in enumerate(samples):
        if sample.keys() != samples[0].keys():
            raise KeyError(
                f"collate_fn: sample {i} has keys {sorted(sample)}, sample 0 has {sorted(keys)}"
            )
    columns: dict[str, Any] = {}
    for key in keys:
        values = [sample[key] for sample in samples]
        is_tensor = isinstance(values[0], torch.Tensor)
        columns[key] = torch.stack(values) if is_tensor else object_array(values)
    return columns


def require_dense_tensor(key: str, tensor: object) -> None:
    """Raise ``TypeError`` for a tensor column that is not one dense tensor [B, ...].

    Row selection and serialisation do not support nested ``TensorDict`` objects and jagged tensors.
    """
    column_name = f"batch[{key!r}]"
    if isinstance(tensor, TensorDictBase):
        inner_keys = ", ".join(map(str, list(tensor.keys())[:3]))
        raise TypeError(
            f"{column_name} is a nested {type(tensor).__name__}; a DataProto holds plain tensors "
            f"[B, ...]: make each of its entries a column ({inner_keys}, ...)"
        )
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{column_name} is a {type(tensor).__name__}, not a torch.Tensor")
    if tensor.is_nested or tensor.layout is not torch.strided:
        layout_name = "jagged" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise TypeError(
            f"{column_name} is a {layout_name} tensor; a DataProto holds dense tensors [B, ...]: "
            "pad it (torch.nested.to_padded_tensor, to_dense), or give a list of B tensors as a "
            "non-tensor column"
        )


# ---- column names ------------------------------------------------------------------------------


def as_keys(keys: str | Iterable[str] | None) -> list[str]:
    """Return a list of column names; a single string is one name, ``None`` gives an empty list."""
    if keys is None:
        return []
    return [keys] if isinstance(keys, str) else list(keys)


def require_keys(
    container_name: str, required_keys: Iterable[str], present_keys: Iterable[str]
) -> None:
    """Raise ``KeyError`` if a key of ``required_keys`` is not in ``present_keys``.

    ``container_name`` names the container of ``present_keys`` in the message. The message suggests
    a similar key.
    """
    present_keys = list(present_keys)
    for key in required_keys:
        if key not in present_keys:
            # This module must not import other packages of verl, so verl.config.settings.hints
            # cannot be used here.
            similar_keys = difflib.get_close_matches(str(key), present_keys, n=1)
            hint = f"; did you mean {similar_keys[0]!r}?" if similar_keys else ""
            raise KeyError(
                f"{container_name} has no key {key!r}{hint}; it has: {sorted(present_keys)}"
            )


# ---- comparison and concatenation --------------------------------------------------------------


def is_deeply_equal(a: object, b: object) -> bool:
    """Return True if two values are deeply equal; NaN equals NaN.

    Compares tensors, arrays, lists, tuples, dicts and plain values. Types must be equal too.
    """
    if a is b:
        return True
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return _are_equal_tensors(a, b)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.shape == b.shape and all(
            map(is_deeply_equal, a.ravel().tolist(), b.ravel().tolist())
        )
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and type(a) is type(b):
        return len(a) == len(b) and all(map(is_deeply_equal, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(is_deeply_equal(a[k], b[k]) for k in a)
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (a != a and b != b)
    return type(a) is type(b) and bool(a == b)


def _are_equal_tensors(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    b = b.to(a.device)
    both_nan = (a != a) & (b != b)
    return bool(((a == b) | both_nan).all())


def union_dict(
    container_name: str, first: Mapping[str, Any], second: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a dict with the entries of both dicts.

    Raises ``ValueError`` if both have a key with different values. ``container_name`` names the
    dicts in the message, such as ``meta_info``.
    """
    for key in first.keys() & second.keys():
        if not is_deeply_equal(first[key], second[key]):
            raise ValueError(
                f"union: both sides have {container_name}[{key!r}] and the values differ"
            )
    return {**first, **second}


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """Return a ``TensorDict`` with the tensors of both arguments.

    Raises ``ValueError`` if the batch sizes differ, or if both have a key with different values.
    """
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        sizes = f"{list(tensor_dict1.batch_size)} and {list(tensor_dict2.batch_size)}"
        raise ValueError(f"union: batch sizes disagree: {sizes}")
    merged_tensors = union_dict("batch", dict(tensor_dict1.items()), dict(tensor_dict2.items()))
    return TensorDict(merged_tensors, batch_size=tensor_dict1.batch_size)


def concat_tensors(key: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate the rows of the tensors ``parts``, each [B_i, ...], of column ``key``.

    Raises ``ValueError`` if row shapes or dtypes differ. ``torch.cat`` would promote different
    dtypes silently.
    """
    row_shapes = {tuple(part.shape[1:]) for part in parts}
    dtypes = {part.dtype for part in parts}
    if len(row_shapes) > 1 or len(dtypes) > 1:
        layouts = f"row shapes {sorted(row_shapes)} and dtypes {sorted(map(str, dtypes))}"
        raise ValueError(f"concat: batch[{key!r}] has {layouts}; pad or cast first")
    return torch.cat(list(parts))


def concat_meta_info(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge ``parts``, the ``meta_info`` of each table that is concatenated.

    Each key gets its value in the first table that has it. The key ``metrics`` is an exception:
    every metric becomes the list of its values in all tables, in order. Metrics stay plain numbers
    if only one table has metrics, or if the tables share one metrics dict (rows selected from one
    table).
    """
    joined_info: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            joined_info.setdefault(key, value)
    part_metrics = [part[METRICS] for part in parts if isinstance(part.get(METRICS), Mapping)]
    distinct_metrics = list({id(metrics): metrics for metrics in part_metrics}.values())
    if len(distinct_metrics) > 1:
        joined_info[METRICS] = _concat_metrics(distinct_metrics)
    return joined_info


def _concat_metrics(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    joined_metrics: dict[str, Any] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        values = [part[name] for part in parts if name in part]
        if isinstance(values[0], Mapping):
            joined_metrics[name] = _concat_metrics(values)
            continue
        joined_metrics[name] = [list_item for value in values for list_item in _as_list(value)]
    return joined_metrics


def _as_list(value: object) -> list[Any]:
    if isinstance(value, torch.Tensor | np.ndarray):
        value = value.tolist()
    return list(value) if isinstance(value, list | tuple) else [value]


# ---- transfer between processes ----------------------------------------------------------------


def tensor_to_buffer(tensor: torch.Tensor) -> tuple[np.ndarray, str]:
    """Return the tensor as a contiguous numpy array, and the name of the tensor's dtype.

    A dtype that numpy lacks is viewed as an integer of the same size.
    """
    tensor = tensor.detach().to("cpu").contiguous()
    name = str(tensor.dtype).removeprefix("torch.")
    try:
        return tensor.numpy(), name
    except TypeError:  # bfloat16 and the float8 family have no numpy dtype
        return tensor.view(_INTEGER_DTYPES[tensor.element_size()]).numpy(), name


def tensor_from_buffer(array: np.ndarray, name: str) -> torch.Tensor:
    """Return the tensor of dtype ``name`` from which ``tensor_to_buffer`` made ``array``."""
    tensor = torch.from_numpy(as_writable(array))
    dtype = getattr(torch, name)
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


def as_writable(array: np.ndarray) -> np.ndarray:
    """Return ``array``, or a copy of it if it is read-only."""
    # Buffers in Ray's object store are read-only. Writing to one through a tensor would crash the
    # process instead of raising an error.
    return array if array.flags.writeable else array.copy()
