"""DataProto: the table of tensors that packages exchange; ``verl.records`` has typed records.

A ``DataProto`` is a table of ``B`` rows with three parts::

    batch             TensorDict, every tensor [B, ...]            what the maths works on
    non_tensor_batch  dict of numpy arrays [B] (often objects)     ids, texts, per-row records
    meta_info         dict, not per row                            temperature, metrics, timing

Row i of ``batch`` and row i of ``non_tensor_batch`` belong together. Example::

    data = DataProto.from_dict(
        tensors={"responses": torch.zeros(4, 7, dtype=torch.long)},     # [B, R]
        non_tensors={"uid": ["a", "a", "b", "b"]},                      # [B]
        meta_info={"temperature": 1.0},
    )
    data[1:3], data[[0, 2]], data[mask], data[0].non_tensor_batch["uid"]

Without tensors, ``batch`` is an empty TensorDict whose batch size follows the other columns.

Ray pickles a table to send it. Pickling moves tensors to the CPU and passes contiguous numpy
buffers to the pickler. A slice thus sends only its rows, and Ray transfers buffers out of band.
``narrow_dtypes`` sends columns in smaller dtypes.
"""

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, overload

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from verl.columns import (
    RESTORED_DTYPES,
    as_column,
    as_keys,
    as_writable,
    collate_fn,
    concat_meta_info,
    concat_tensors,
    object_array,
    require_dense_tensor,
    require_keys,
    tensor_from_buffer,
    tensor_to_buffer,
    union_dict,
    union_tensor_dict,
)

__all__ = [
    "DataProto",
    "DataProtoItem",
    "collate_fn",
    "object_array",
    "pad_dataproto_to_divisor",
    "union_tensor_dict",
    "unpad_dataproto",
]

COMPAT_MODULE = "verl.compat.data_proto"

RowIndices: TypeAlias = Sequence[int] | Sequence[bool] | np.ndarray | torch.Tensor
Keys: TypeAlias = str | Iterable[str] | None


def _empty_tensordict(*batch_size: int) -> TensorDict:
    return TensorDict({}, batch_size=list(batch_size))


@dataclass(eq=False)
class DataProtoItem:
    """One row: tensors without the leading dimension, plain values, and ``meta_info``."""

    batch: TensorDict = field(default_factory=_empty_tensordict)
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


class DataProto:
    """Rows of tensors and objects with shared ``meta_info``; see the module docstring.

    A slice shares memory with its source; a selection by list or mask is a copy. Objects inside
    object arrays are always shared. Raises ``ValueError`` if the lengths of columns differ.
    """

    batch: TensorDict
    non_tensor_batch: dict[str, np.ndarray]
    meta_info: dict[str, Any]

    def __init__(
        self,
        batch: TensorDict | None = None,
        non_tensor_batch: Mapping[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
    ) -> None:
        columns = non_tensor_batch or {}
        self.non_tensor_batch = {key: as_column(key, values) for key, values in columns.items()}
        self.meta_info = {} if meta_info is None else meta_info
        self.batch = self._empty_batch() if batch is None else batch
        self.check_consistency()

    def _empty_batch(self) -> TensorDict:
        columns = list(self.non_tensor_batch.values())
        return _empty_tensordict(len(columns[0]) if columns else 0)

    def __repr__(self) -> str:
        tensor_descriptions = {
            key: f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
            for key, tensor in self.batch.items()
        }
        column_dtypes = {key: str(column.dtype) for key, column in self.non_tensor_batch.items()}
        return (
            f"DataProto({len(self)} rows, batch={tensor_descriptions}, "
            f"non_tensor_batch={column_dtypes}, meta_info={self.meta_info})"
        )

    # ---- construction --------------------------------------------------------------------------

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> "DataProto":
        """Build a table from tensors [B, ...] and arrays or lists of B values.

        Raises ``ValueError`` for different lengths, and ``TypeError`` for a tensor that is not
        dense.
        """
        lengths: dict[str, int] = {}
        for key, tensor in (tensors or {}).items():
            require_dense_tensor(key, tensor)
            if tensor.dim() == 0:
                raise ValueError(f"tensors[{key!r}] is a scalar; it needs one entry per row")
            lengths[key] = len(tensor)
        if len(set(lengths.values())) > 1:
            raise ValueError(f"lengths disagree in batch: {lengths}")
        batch = None
        if tensors:
            num_rows = next(iter(lengths.values()))
            batch = TensorDict(dict(tensors), batch_size=[num_rows])
        return cls(batch, non_tensors, dict(meta_info or {}))

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None
    ) -> "DataProto":
        """Build a table from one dict: tensors go to ``batch``, others to ``non_tensor_batch``."""
        tensors = {k: v for k, v in data.items() if isinstance(v, torch.Tensor | TensorDictBase)}
        other_values = {k: v for k, v in data.items() if k not in tensors}
        return cls.from_dict(tensors=tensors, non_tensors=other_values, meta_info=meta_info)

    @staticmethod
    def concat(data: Sequence["DataProto"]) -> "DataProto":
        """Concatenate the rows of the tables ``data``. Tables without columns are skipped.

        ``meta_info`` keeps for each key the value of the first table that has it. Metrics under
        ``meta_info["metrics"]`` become lists of the values of all tables, which
        ``verl.trainer.ppo.metrics.reduce_metrics`` reduces by name. Raises ``ValueError`` if
        columns or row shapes of the tables differ, or if ``data`` is empty.
        """
        if not data:
            raise ValueError("concat: no parts")
        for part in data:
            part.check_consistency()
        meta_info = concat_meta_info([part.meta_info for part in data])
        filled_parts = [part for part in data if part.keys()]
        if not filled_parts:
            return DataProto(meta_info=meta_info)
        first_part = filled_parts[0]
        for i, part in enumerate(filled_parts):
            if set(part.keys()) != set(first_part.keys()):
                differing_keys = sorted(set(part.keys()) ^ set(first_part.keys()))
                raise ValueError(
                    f"concat: part {i} and part 0 do not have the same keys; they differ in "
                    f"{differing_keys}"
                )
        tensors = {
            k: concat_tensors(k, [part.batch[k] for part in filled_parts])
            for k in first_part.tensor_keys()
        }
        other_columns = {
            key: np.concatenate([part.non_tensor_batch[key] for part in filled_parts])
            for key in first_part.non_tensor_batch
        }
        return DataProto.from_dict(tensors, other_columns, meta_info)

    # ---- columns and size ----------------------------------------------------------------------

    def tensor_keys(self) -> list[str]:
        """Return the names of the columns in ``batch``."""
        return [key for key, _ in self.batch.items()]

    def keys(self) -> list[str]:
        """Return the names of all columns, tensors first."""
        return self.tensor_keys() + list(self.non_tensor_batch)

    def __len__(self) -> int:
        # Without tensors, ``batch_size`` is outdated if a column was added to non_tensor_batch.
        if self.non_tensor_batch and not self.tensor_keys():
            return len(next(iter(self.non_tensor_batch.values())))
        return self.batch.batch_size[0]

    def check_consistency(self) -> None:
        """Raise ``ValueError`` for columns whose length differs from the number of rows.

        Raises ``TypeError`` for a tensor column that is nested or jagged.
        """
        if self.batch.batch_dims != 1:
            raise ValueError(
                f"batch must have exactly one batch dimension, got {list(self.batch.batch_size)}"
            )
        for key, tensor in self.batch.items():
            require_dense_tensor(key, tensor)
        num_rows = len(self)
        differing_lengths = {
            key: len(col) for key, col in self.non_tensor_batch.items() if len(col) != num_rows
        }
        if differing_lengths:
            raise ValueError(
                f"lengths disagree: the table has {num_rows} rows, but non_tensor_batch has "
                f"{differing_lengths}"
            )

    # ---- selection of rows ---------------------------------------------------------------------

    @overload
    def __getitem__(self, item: int | np.integer) -> DataProtoItem: ...
    @overload
    def __getitem__(self, item: slice | RowIndices) -> "DataProto": ...
    def __getitem__(
        self, item: int | np.integer | slice | RowIndices
    ) -> "DataProto | DataProtoItem":
        """Return one row as ``DataProtoItem`` for an ``int``, else the selected rows.

        ``item`` can be a slice, indices (list, array, tensor) or a boolean mask [B].
        """
        self.check_consistency()
        if isinstance(item, slice):
            batch = self.batch[item] if self.tensor_keys() else None
            other_columns = {key: column[item] for key, column in self.non_tensor_batch.items()}
            return DataProto(batch, other_columns, dict(self.meta_info))
        if not isinstance(item, (int, np.integer)):
            return self.select_idxs(item)
        if not -len(self) <= item < len(self):
            raise IndexError(f"row {item} of a DataProto with {len(self)} rows")
        row = self.batch[int(item)] if self.tensor_keys() else _empty_tensordict()
        values = {key: column[item] for key, column in self.non_tensor_batch.items()}
        return DataProtoItem(row, values, self.meta_info)

    def select_idxs(self, idxs: RowIndices) -> "DataProto":
        """Return a copy of the rows at ``idxs``, or of those where a boolean mask [B] is true."""
        index = self._as_index(idxs)
        batch = None
        if self.tensor_keys():
            device = next(iter(self.batch.values())).device
            batch = self.batch[torch.from_numpy(index).to(device)]
        other_columns = {key: column[index] for key, column in self.non_tensor_batch.items()}
        return DataProto(batch, other_columns, dict(self.meta_info))

    def _as_index(self, idxs: RowIndices) -> np.ndarray:
        if isinstance(idxs, str):
            raise TypeError(
                f"a DataProto is indexed by rows; use .batch[{idxs!r}] or "
                f".non_tensor_batch[{idxs!r}]"
            )
        index = idxs.detach().cpu().numpy() if isinstance(idxs, torch.Tensor) else np.asarray(idxs)
        if index.ndim != 1:
            raise IndexError(f"row indices must be one-dimensional, got shape {index.shape}")
        if index.dtype == bool:
            if len(index) != len(self):
                raise IndexError(
                    f"the mask has {len(index)} entries, the DataProto {len(self)} rows"
                )
            return np.flatnonzero(index)
        # An empty selection is allowed, although np.asarray([]) has a float dtype.
        if index.size and not np.issubdtype(index.dtype, np.integer):
            raise IndexError(f"row indices must be integers or booleans, got {index.dtype}")
        index = index.astype(np.int64)
        if index.size and (index.min() < -len(self) or index.max() >= len(self)):
            raise IndexError(
                f"row indices {index.min()}..{index.max()} out of range for {len(self)} rows"
            )
        return index

    # ---- selection of columns ------------------------------------------------------------------

    def select(
        self,
        batch_keys: Keys = None,
        non_tensor_batch_keys: Keys = None,
        meta_info_keys: Keys = None,
    ) -> "DataProto":
        """Return a new table with the columns and ``meta_info`` keys that are named.

        It shares the memory of the columns. None keeps all keys of this kind, ``[]`` keeps none.
        Raises ``KeyError`` for an unknown key, with a similar name.
        """
        tensor_names = self.tensor_keys() if batch_keys is None else as_keys(batch_keys)
        other_keys = list(self.non_tensor_batch)
        if non_tensor_batch_keys is not None:
            other_keys = as_keys(non_tensor_batch_keys)
        meta_keys = list(self.meta_info) if meta_info_keys is None else as_keys(meta_info_keys)
        require_keys("batch", tensor_names, self.tensor_keys())
        require_keys("non_tensor_batch", other_keys, self.non_tensor_batch)
        require_keys("meta_info", meta_keys, self.meta_info)
        return DataProto(
            batch=self.batch.select(*tensor_names) if tensor_names else None,
            non_tensor_batch={key: self.non_tensor_batch[key] for key in other_keys},
            meta_info={key: self.meta_info[key] for key in meta_keys},
        )

    def pop(
        self,
        batch_keys: Keys = None,
        non_tensor_batch_keys: Keys = None,
        meta_info_keys: Keys = None,
    ) -> "DataProto":
        """Remove the named columns from this table and return them as a new table."""
        tensor_names = as_keys(batch_keys)
        other_keys = as_keys(non_tensor_batch_keys)
        meta_keys = as_keys(meta_info_keys)
        popped_table = self.select(tensor_names, other_keys, meta_keys)
        for key in other_keys:
            del self.non_tensor_batch[key]
        for key in meta_keys:
            del self.meta_info[key]
        # Make a new TensorDict, because other tables may share this one.
        remaining_batch = self.batch.exclude(*tensor_names)
        self.batch = remaining_batch if remaining_batch.keys() else self._empty_batch()
        return popped_table

    def rename(self, old_keys: str | Iterable[str], new_keys: str | Iterable[str]) -> "DataProto":
        """Rename tensor and non-tensor columns in place and return ``self``.

        Raises ``KeyError`` for an unknown key, and ``ValueError`` if a new name is already in use.
        """
        old_names = as_keys(old_keys)
        new_names = as_keys(new_keys)
        if len(old_names) != len(new_names):
            raise ValueError(f"rename: {len(old_names)} old keys but {len(new_names)} new ones")
        require_keys("the DataProto", old_names, self.keys())
        used_names = set(new_names) & (set(self.keys()) - set(old_names))
        if used_names or len(set(new_names)) != len(new_names):
            raise ValueError(
                f"rename: the new names {new_names} are not free: "
                f"{sorted(used_names) or 'they repeat'}"
            )
        new_name_by_old = dict(zip(old_names, new_names, strict=True))
        renamed_tensors = {
            new_name_by_old.get(key, key): tensor for key, tensor in self.batch.items()
        }
        self.batch = TensorDict(renamed_tensors, batch_size=self.batch.batch_size)
        self.non_tensor_batch = {
            new_name_by_old.get(key, key): column for key, column in self.non_tensor_batch.items()
        }
        return self

    def union(self, other: "DataProto") -> "DataProto":
        """Add the columns and ``meta_info`` of ``other`` in place and return ``self``.

        Raises ``ValueError`` if the lengths differ or a common key holds different values.
        """
        if self.keys() and other.keys() and len(self) != len(other):
            raise ValueError(f"union: lengths disagree: {len(self)} and {len(other)} rows")
        clashing_keys = set(self.tensor_keys()) & set(other.non_tensor_batch)
        clashing_keys |= set(self.non_tensor_batch) & set(other.tensor_keys())
        if clashing_keys:
            raise ValueError(
                f"union: {sorted(clashing_keys)} are tensors on one side and not on the other"
            )
        non_tensors = union_dict("non_tensor_batch", self.non_tensor_batch, other.non_tensor_batch)
        meta_info = union_dict("meta_info", self.meta_info, other.meta_info)
        batch = self.batch
        if other.tensor_keys():
            batch = union_tensor_dict(batch, other.batch) if self.tensor_keys() else other.batch
        # Assign after all checks, so that an error leaves this table unchanged.
        self.non_tensor_batch = non_tensors
        self.meta_info = meta_info
        self.batch = batch if batch.keys() else self._empty_batch()
        return self

    # ---- order and division of rows ------------------------------------------------------------

    def reorder(self, indices: RowIndices) -> None:
        """Permute the rows in place: the new row ``i`` is the old row ``indices[i]``."""
        index = self._as_index(indices)
        if not np.array_equal(np.sort(index), np.arange(len(self))):
            raise ValueError(f"reorder needs a permutation of the {len(self)} rows")
        reordered_table = self.select_idxs(index)
        self.batch = reordered_table.batch
        self.non_tensor_batch = reordered_table.non_tensor_batch

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> "DataProto":
        """Repeat every row ``repeat_times`` times.

        Example: rows a, b repeated twice are a, a, b, b if interleaved, else a, b, a, b.
        """
        if repeat_times < 1:
            raise ValueError(f"repeat_times must be at least 1, got {repeat_times}")
        index = np.arange(len(self))
        repeated_index = (
            np.repeat(index, repeat_times) if interleave else np.tile(index, repeat_times)
        )
        return self.select_idxs(repeated_index)

    def chunk(self, chunks: int) -> list["DataProto"]:
        """Split into ``chunks`` tables of equal length in order.

        Raises ``ValueError`` if the number of rows is not a multiple of ``chunks``.
        """
        if chunks < 1 or len(self) % chunks:
            hint = "use pad_dataproto_to_divisor first"
            if chunks < 1:
                hint = "chunks must be at least 1"
            raise ValueError(f"cannot cut {len(self)} rows into {chunks} equal chunks; {hint}")
        chunk_length = len(self) // chunks
        return [self[i * chunk_length : (i + 1) * chunk_length] for i in range(chunks)]

    def split(self, split_size: int) -> list["DataProto"]:
        """Split into tables of ``split_size`` rows in order. The last table may be shorter."""
        if split_size < 1:
            raise ValueError(f"split_size must be at least 1, got {split_size}")
        return [self[i : i + split_size] for i in range(0, len(self), split_size)]

    def to(self, device: str | torch.device) -> "DataProto":
        """Move the tensors to ``device`` in place and return ``self``."""
        if self.tensor_keys():
            self.batch = self.batch.to(device)
        return self

    # ---- serialisation -------------------------------------------------------------------------

    def narrow_dtypes(self, dtypes: Mapping[str, torch.dtype]) -> "DataProto":
        """Return a table whose columns have smaller ``dtypes`` until another process receives it.

        That process restores the dtypes. Columns that this table lacks are ignored. The caller
        ensures that the values fit.
        """
        keys = [key for key in dtypes if key in self.tensor_keys()]
        table = self.select()
        original_dtypes = {key: self.batch[key].dtype for key in keys}
        for key in keys:
            table.batch[key] = self.batch[key].to(dtypes[key])
        table.meta_info[RESTORED_DTYPES] = original_dtypes
        return table

    def __getstate__(self) -> dict[str, Any]:
        self.check_consistency()
        return {
            "size": len(self),
            "tensors": {key: tensor_to_buffer(tensor) for key, tensor in self.batch.items()},
            "non_tensors": self.non_tensor_batch,
            "meta_info": self.meta_info,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        tensors = {key: tensor_from_buffer(*buffer) for key, buffer in state["tensors"].items()}
        for key, dtype in state["meta_info"].pop(RESTORED_DTYPES, {}).items():
            tensors[key] = tensors[key].to(dtype)
        self.batch = TensorDict(tensors, batch_size=[state["size"]])
        self.non_tensor_batch = {key: as_writable(col) for key, col in state["non_tensors"].items()}
        self.meta_info = state["meta_info"]

    # ---- methods for code written for verl; see verl/compat ------------------------------------

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int = 1,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator["DataProto"]:
        """Return an iterator over the mini-batches of ``epochs`` epochs.

        ``dataloader_kwargs={"shuffle": True}`` permutes the rows of each epoch by ``seed``.
        Raises ``ValueError`` if the length is not a multiple of ``mini_batch_size``.
        """
        args = (mini_batch_size, epochs, seed, dataloader_kwargs)
        return importlib.import_module(COMPAT_MODULE).make_iterator(self, *args)

    def save_to_disk(self, path: str | Path) -> None:
        """Write the table to directory ``path`` with ``verl.compat.data_proto.save_to_disk``."""
        importlib.import_module(COMPAT_MODULE).save_to_disk(self, path)

    @classmethod
    def load_from_disk(cls, path: str | Path) -> "DataProto":
        """Return the table that ``save_to_disk`` wrote to directory ``path``."""
        return importlib.import_module(COMPAT_MODULE).load_from_disk(path)


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Repeat rows from the start until the length is a multiple of ``size_divisor``.

    Returns ``(padded, pad_size)``. A table that needs no padding is returned unchanged, with 0.
    """
    if size_divisor < 1:
        raise ValueError(f"size_divisor must be at least 1, got {size_divisor}")
    pad_size = -len(data) % size_divisor
    if not pad_size:
        return data, 0
    # The modulo repeats a short table more than once if needed.
    index = np.arange(len(data) + pad_size) % len(data)
    return data.select_idxs(index), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Return ``data`` without its last ``pad_size`` rows."""
    if not 0 <= pad_size <= len(data):
        raise ValueError(f"cannot drop {pad_size} of {len(data)} rows")
    return data[: len(data) - pad_size] if pad_size else data
