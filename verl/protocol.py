"""DataProto: the only thing that travels between the rooms of the framework.

A ``DataProto`` is a table of ``B`` rows with three parts::

    batch             TensorDict, every tensor [B, ...]            what the maths works on
    non_tensor_batch  dict of numpy arrays [B] (often objects)     ids, texts, per-row records
    meta_info         dict, not per row                            temperature, metrics, timing

Rows of the two tables always correspond. Example::

    data = DataProto.from_dict(
        tensors={"responses": torch.zeros(4, 7, dtype=torch.long)},     # [B, R]
        non_tensors={"uid": ["a", "a", "b", "b"]},                      # [B]
        meta_info={"temperature": 1.0},
    )
    data[1:3], data[[0, 2]], data[mask], data[0].non_tensor_batch["uid"]

Pickling (which is how Ray ships objects) moves tensors to the CPU and hands contiguous numpy
buffers to the pickler, so that a slice ships its own rows only and Ray's object store takes the
buffers out of band.
"""

import difflib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tensordict import TensorDict

__all__ = [
    "DataProto",
    "DataProtoItem",
    "collate_fn",
    "object_array",
    "pad_dataproto_to_divisor",
    "union_tensor_dict",
    "unpad_dataproto",
]

TENSOR_FILE = "batch.safetensors"
JSON_FILE = "data.json"
_SHIPPED_AS = {
    1: torch.uint8,
    2: torch.int16,
}  # integer stand-ins for dtypes numpy lacks, by bytes per element


def object_array(values: Iterable[Any]) -> np.ndarray:
    """One-dimensional object array of ``values``, also where the values are lists of equal length."""
    values = list(values)
    array = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        array[i] = value
    return array


def _as_column(key: str, values: Any) -> np.ndarray:
    column = values if isinstance(values, np.ndarray) else None
    if column is None:
        if isinstance(values, (str, bytes, dict)) or not isinstance(values, Iterable):
            raise TypeError(
                f"non_tensor_batch[{key!r}] must be an array or a list of B values, got {type(values)}"
            )
        column = object_array(values)
    if column.ndim == 0:
        raise ValueError(f"non_tensor_batch[{key!r}] is a scalar; it needs one value per row")
    return column


def _require_keys(what: str, wanted: Iterable[str], present: Iterable[str]) -> None:
    present = list(present)
    for key in wanted:
        if key not in present:
            near = difflib.get_close_matches(str(key), present, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise KeyError(f"{what} has no key {key!r}{hint} It has: {sorted(present)}")


def _as_keys(keys: str | Iterable[str] | None) -> list[str]:
    if keys is None:
        return []
    return [keys] if isinstance(keys, str) else list(keys)


def _same(a: Any, b: Any) -> bool:
    """Deep equality in which NaN equals NaN, over tensors, arrays, sequences, dicts and plain
    values.
    """
    if a is b:
        return True
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        b = b.to(a.device)
        equal = a == b
        return bool((equal | ((a != a) & (b != b))).all())
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.shape == b.shape and all(map(_same, a.ravel().tolist(), b.ravel().tolist()))
    if isinstance(a, (list, tuple)) and type(a) is type(b):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (a != a and b != b)
    return type(a) is type(b) and bool(a == b)


def _union_dict(what: str, first: dict, second: dict) -> dict:
    for key in first.keys() & second.keys():
        if not _same(first[key], second[key]):
            raise ValueError(f"union: both sides have {what}[{key!r}] and the values differ")
    return {**first, **second}


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """Keys of both; a key on both sides must hold equal tensors. Neither argument is changed.

    Raises ``ValueError`` when the batch sizes or the values of a common key differ.
    """
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        sizes = f"{list(tensor_dict1.batch_size)} and {list(tensor_dict2.batch_size)}"
        raise ValueError(f"union: batch sizes disagree: {sizes}")
    merged = _union_dict("batch", dict(tensor_dict1.items()), dict(tensor_dict2.items()))
    return TensorDict(merged, batch_size=tensor_dict1.batch_size)


def collate_fn(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Turn row dicts into columns: tensors are stacked to [B, ...], everything else becomes an
    object array [B].

    Feed the result to ``DataProto.from_single_dict``. Raises ``KeyError`` when the rows have
    different keys.
    """
    if not samples:
        raise ValueError("collate_fn: no samples")
    keys = list(samples[0])
    for i, sample in enumerate(samples):
        if sample.keys() != samples[0].keys():
            raise KeyError(
                f"collate_fn: sample {i} has keys {sorted(sample)}, sample 0 has {sorted(keys)}"
            )
    columns = {key: [sample[key] for sample in samples] for key in keys}
    stacked = {k: torch.stack(v) for k, v in columns.items() if isinstance(v[0], torch.Tensor)}
    return {k: stacked[k] if k in stacked else object_array(v) for k, v in columns.items()}


@dataclass(eq=False)
class DataProtoItem:
    """One row: tensors without the leading dimension, plain values, and the table's ``meta_info``."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class DataProto:
    """Rows of tensors and objects with shared ``meta_info``; see the module docstring.

    Row selections share memory with (slices) or copy from (lists, masks) their source; objects
    inside object arrays are shared, never copied. Raises ``ValueError`` when the columns' lengths
    disagree.
    """

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.non_tensor_batch = {k: _as_column(k, v) for k, v in self.non_tensor_batch.items()}
        self.check_consistency()

    def __repr__(self) -> str:
        tensors = {
            k: f"{list(v.shape)} {str(v.dtype).removeprefix('torch.')}"
            for k, v in self._tensor_items()
        }
        others = {k: str(v.dtype) for k, v in self.non_tensor_batch.items()}
        return f"DataProto({len(self)} rows, batch={tensors}, non_tensor_batch={others}, meta_info={self.meta_info})"

    # ---- making -------------------------------------------------------------------------------------------------

    @classmethod
    def from_dict(
        cls,
        tensors: dict[str, torch.Tensor] | None = None,
        non_tensors: dict[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
    ) -> "DataProto":
        """Build from tensors [B, ...] and arrays or lists of B values.

        Raises ``ValueError`` naming the columns whose lengths disagree, ``TypeError`` for a
        non-tensor in ``tensors``.
        """
        sizes = {}
        for key, tensor in (tensors or {}).items():
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(
                    f"tensors[{key!r}] is a {type(tensor).__name__}, not a torch.Tensor"
                )
            if tensor.dim() == 0:
                raise ValueError(f"tensors[{key!r}] is a scalar; it needs one entry per row")
            sizes[key] = len(tensor)
        if len(set(sizes.values())) > 1:
            raise ValueError(f"lengths disagree in batch: {sizes}")
        batch = TensorDict(tensors, batch_size=[next(iter(sizes.values()))]) if tensors else None
        return cls(
            batch=batch, non_tensor_batch=dict(non_tensors or {}), meta_info=dict(meta_info or {})
        )

    @classmethod
    def from_single_dict(
        cls, data: dict[str, Any], meta_info: dict[str, Any] | None = None
    ) -> "DataProto":
        """Build from one dict: tensors go to ``batch``, arrays and lists to ``non_tensor_batch``."""
        tensors = {k: v for k, v in data.items() if isinstance(v, torch.Tensor)}
        others = {k: v for k, v in data.items() if k not in tensors}
        return cls.from_dict(tensors=tensors, non_tensors=others, meta_info=meta_info)

    @staticmethod
    def concat(data: Sequence["DataProto"]) -> "DataProto":
        """Rows of all parts in order; ``meta_info`` keeps, for each key, the value of the first
        part that has it.

        Parts without columns are skipped. Raises when the parts' columns or row shapes differ, or
        ``data`` is empty.
        """
        if not data:
            raise ValueError("concat: no parts")
        meta_info: dict[str, Any] = {}
        for part in data:
            part.check_consistency()
            meta_info.update({k: v for k, v in part.meta_info.items() if k not in meta_info})
        parts = [part for part in data if part.keys()]
        if not parts:
            return DataProto(meta_info=meta_info)
        first = parts[0]
        for i, part in enumerate(parts):
            if set(part.keys()) != set(first.keys()):
                odd = sorted(set(part.keys()) ^ set(first.keys()))
                raise ValueError(
                    f"concat: part {i} and part 0 do not have the same keys; they differ in {odd}"
                )
        tensors = {k: _cat(k, [part.batch[k] for part in parts]) for k in first.tensor_keys()}
        others = {
            k: np.concatenate([part.non_tensor_batch[k] for part in parts])
            for k in first.non_tensor_batch
        }
        return DataProto.from_dict(tensors, others, meta_info)

    # ---- looking ------------------------------------------------------------------------------------------------

    def _tensor_items(self) -> list[tuple[str, torch.Tensor]]:
        return [] if self.batch is None else list(self.batch.items())

    def tensor_keys(self) -> list[str]:
        """Names of the tensor columns."""
        return [key for key, _ in self._tensor_items()]

    def keys(self) -> list[str]:
        """Names of all columns, tensors first."""
        return self.tensor_keys() + list(self.non_tensor_batch)

    def __len__(self) -> int:
        if self.batch is not None:
            return self.batch.batch_size[0]
        return len(next(iter(self.non_tensor_batch.values()))) if self.non_tensor_batch else 0

    def check_consistency(self) -> None:
        """Raise ``ValueError`` naming every column whose length differs from the table's."""
        if self.batch is not None and self.batch.batch_dims != 1:
            raise ValueError(
                f"batch must have exactly one batch dimension, got {list(self.batch.batch_size)}"
            )
        size = len(self)
        wrong = {k: len(v) for k, v in self.non_tensor_batch.items() if len(v) != size}
        if wrong:
            raise ValueError(
                f"lengths disagree: the table has {size} rows, but non_tensor_batch has {wrong}"
            )

    def __getitem__(self, item: Any) -> "DataProto | DataProtoItem":
        """``int`` → ``DataProtoItem``; slice, list, array, tensor of indices or boolean mask [B] →
        ``DataProto``.
        """
        self.check_consistency()
        if isinstance(item, (int, np.integer)):
            return self._row(int(item))
        if isinstance(item, slice):
            batch = None if self.batch is None else self.batch[item]
            others = {k: v[item] for k, v in self.non_tensor_batch.items()}
            return DataProto(batch=batch, non_tensor_batch=others, meta_info=dict(self.meta_info))
        return self.select_idxs(item)

    def _row(self, index: int) -> DataProtoItem:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of a DataProto with {len(self)} rows")
        batch = None if self.batch is None else self.batch[index]
        return DataProtoItem(
            batch, {k: v[index] for k, v in self.non_tensor_batch.items()}, self.meta_info
        )

    def select_idxs(self, idxs: Sequence[int] | np.ndarray | torch.Tensor) -> "DataProto":
        """Rows at ``idxs`` (repeats allowed), or rows where a boolean mask [B] is true; columns are
        copied.
        """
        index = self._as_index(idxs)
        batch = (
            None
            if self.batch is None
            else self.batch[torch.from_numpy(index).to(_device_of(self.batch))]
        )
        others = {k: v[index] for k, v in self.non_tensor_batch.items()}
        return DataProto(batch=batch, non_tensor_batch=others, meta_info=dict(self.meta_info))

    def _as_index(self, idxs: Any) -> np.ndarray:
        if isinstance(idxs, str):
            raise TypeError(
                f"a DataProto is indexed by rows; use .batch[{idxs!r}] or .non_tensor_batch[{idxs!r}]"
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
        if index.size and not np.issubdtype(index.dtype, np.integer):
            raise IndexError(f"row indices must be integers or booleans, got {index.dtype}")
        index = index.astype(np.int64)
        if index.size and (index.min() < -len(self) or index.max() >= len(self)):
            raise IndexError(
                f"row indices {index.min()}..{index.max()} out of range for {len(self)} rows"
            )
        return index

    # ---- columns ------------------------------------------------------------------------------------------------

    def select(
        self,
        batch_keys: str | Iterable[str] | None = None,
        non_tensor_batch_keys: str | Iterable[str] | None = None,
        meta_info_keys: str | Iterable[str] | None = None,
    ) -> "DataProto":
        """A new table with the named columns, sharing their memory; ``None`` keeps a whole part,
        ``[]`` none of it.

        Raises ``KeyError`` with the nearest match for an unknown key.
        """
        tensors = self.tensor_keys() if batch_keys is None else _as_keys(batch_keys)
        others = (
            list(self.non_tensor_batch)
            if non_tensor_batch_keys is None
            else _as_keys(non_tensor_batch_keys)
        )
        metas = list(self.meta_info) if meta_info_keys is None else _as_keys(meta_info_keys)
        self._require(tensors, others, metas)
        return DataProto(
            batch=None if self.batch is None or not tensors else self.batch.select(*tensors),
            non_tensor_batch={k: self.non_tensor_batch[k] for k in others},
            meta_info={k: self.meta_info[k] for k in metas},
        )

    def pop(
        self,
        batch_keys: str | Iterable[str] | None = None,
        non_tensor_batch_keys: str | Iterable[str] | None = None,
        meta_info_keys: str | Iterable[str] | None = None,
    ) -> "DataProto":
        """Remove the named columns from this table and return them as a table of their own."""
        tensors, others, metas = map(_as_keys, (batch_keys, non_tensor_batch_keys, meta_info_keys))
        popped = self.select(tensors, others, metas)
        if tensors:
            rest = self.batch.exclude(*tensors)
            self.batch = rest if list(rest.keys()) else None
        for key in others:
            del self.non_tensor_batch[key]
        for key in metas:
            del self.meta_info[key]
        return popped

    def rename(self, old_keys: str | Iterable[str], new_keys: str | Iterable[str]) -> "DataProto":
        """Rename columns in place (tensor or not) and return ``self``.

        Raises ``KeyError`` for an unknown key, ``ValueError`` when a new name is taken or the
        counts differ.
        """
        old, new = _as_keys(old_keys), _as_keys(new_keys)
        if len(old) != len(new):
            raise ValueError(f"rename: {len(old)} old keys but {len(new)} new ones")
        _require_keys("the DataProto", old, self.keys())
        taken = set(new) & (set(self.keys()) - set(old))
        if taken or len(set(new)) != len(new):
            raise ValueError(
                f"rename: the new names {new} are not free: {sorted(taken) or 'they repeat'}"
            )
        names = dict(zip(old, new, strict=True))
        if self.batch is not None:
            renamed = {names.get(k, k): v for k, v in self.batch.items()}
            self.batch = TensorDict(renamed, batch_size=self.batch.batch_size)
        self.non_tensor_batch = {names.get(k, k): v for k, v in self.non_tensor_batch.items()}
        return self

    def union(self, other: "DataProto") -> "DataProto":
        """Take over the columns and ``meta_info`` of ``other`` in place and return ``self``.

        Raises ``ValueError`` when the lengths differ or a common key holds different values.
        """
        if self.keys() and other.keys() and len(self) != len(other):
            raise ValueError(f"union: lengths disagree: {len(self)} and {len(other)} rows")
        clash = set(self.tensor_keys()) & set(other.non_tensor_batch) | set(
            self.non_tensor_batch
        ) & set(other.tensor_keys())
        if clash:
            raise ValueError(f"union: {sorted(clash)} are tensors on one side and not on the other")
        non_tensors = _union_dict("non_tensor_batch", self.non_tensor_batch, other.non_tensor_batch)
        meta_info = _union_dict("meta_info", self.meta_info, other.meta_info)
        if other.batch is not None:
            self.batch = (
                other.batch if self.batch is None else union_tensor_dict(self.batch, other.batch)
            )
        self.non_tensor_batch, self.meta_info = non_tensors, meta_info
        return self

    def _require(self, tensors: list[str], others: list[str], metas: list[str]) -> None:
        _require_keys("batch", tensors, self.tensor_keys())
        _require_keys("non_tensor_batch", others, self.non_tensor_batch)
        _require_keys("meta_info", metas, self.meta_info)

    # ---- rows ---------------------------------------------------------------------------------------------------

    def reorder(self, indices: Sequence[int] | np.ndarray | torch.Tensor) -> None:
        """Permute the rows in place: row ``i`` becomes the former row ``indices[i]``."""
        index = self._as_index(indices)
        if not np.array_equal(np.sort(index), np.arange(len(self))):
            raise ValueError(f"reorder needs a permutation of the {len(self)} rows")
        ordered = self.select_idxs(index)
        self.batch, self.non_tensor_batch = ordered.batch, ordered.non_tensor_batch

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> "DataProto":
        """Every row ``repeat_times`` times: ``aabb`` when interleaved, else ``abab``."""
        if repeat_times < 1:
            raise ValueError(f"repeat_times must be at least 1, got {repeat_times}")
        index = np.arange(len(self))
        return self.select_idxs(
            np.repeat(index, repeat_times) if interleave else np.tile(index, repeat_times)
        )

    def chunk(self, chunks: int) -> list["DataProto"]:
        """``chunks`` parts of equal length in order; raises ``ValueError`` when the length does not
        divide.
        """
        if chunks < 1 or len(self) % chunks:
            hint = (
                "use pad_dataproto_to_divisor first" if chunks >= 1 else "chunks must be at least 1"
            )
            raise ValueError(f"cannot cut {len(self)} rows into {chunks} equal chunks; {hint}")
        size = len(self) // chunks
        return [self[i * size : (i + 1) * size] for i in range(chunks)]

    def split(self, split_size: int) -> list["DataProto"]:
        """Parts of ``split_size`` rows in order; the last one may be shorter."""
        if split_size < 1:
            raise ValueError(f"split_size must be at least 1, got {split_size}")
        return [self[i : i + split_size] for i in range(0, len(self), split_size)]

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int = 1,
        seed: int | None = None,
        dataloader_kwargs: dict[str, Any] | None = None,
    ) -> Iterator["DataProto"]:
        """Yield ``epochs`` passes over the rows in mini-batches.

        ``dataloader_kwargs={"shuffle": True}`` draws a new permutation for each epoch from ``seed``
        alone. Raises ``ValueError`` when the length is not a multiple of ``mini_batch_size``.
        """
        options = {"shuffle": False, **(dataloader_kwargs or {})}
        _require_keys("make_iterator's dataloader_kwargs", options, ["shuffle"])
        if mini_batch_size < 1 or len(self) % mini_batch_size:
            raise ValueError(
                f"{len(self)} rows are not a multiple of mini_batch_size={mini_batch_size}"
            )
        return self._mini_batches(
            mini_batch_size, epochs, np.random.default_rng(seed), options["shuffle"]
        )

    def _mini_batches(
        self, size: int, epochs: int, rng: np.random.Generator, shuffle: bool
    ) -> Iterator["DataProto"]:
        for _ in range(epochs):
            order = rng.permutation(len(self)) if shuffle else np.arange(len(self))
            for start in range(0, len(self), size):
                yield self.select_idxs(order[start : start + size])

    def to(self, device: str | torch.device) -> "DataProto":
        """Move the tensors to ``device`` in place and return ``self``."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    # ---- shipping and storing -----------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        self.check_consistency()
        tensors = {k: _to_buffer(v) for k, v in self._tensor_items()}
        return {
            "size": None if self.batch is None else len(self),
            "tensors": tensors,
            "non_tensors": self.non_tensor_batch,
            "meta_info": self.meta_info,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        tensors = {k: _from_buffer(*v) for k, v in state["tensors"].items()}
        self.batch = (
            None if state["size"] is None else TensorDict(tensors, batch_size=[state["size"]])
        )
        self.non_tensor_batch = {k: _writable(v) for k, v in state["non_tensors"].items()}
        self.meta_info = state["meta_info"]

    def save_to_disk(self, path: str | Path) -> None:
        """Write the directory ``path``: tensors as safetensors, the rest as JSON. Nothing is
        pickled.

        Tuples, numpy arrays and dicts with keys that are no strings survive; numpy scalars come
        back as Python numbers. Raises ``TypeError`` naming the place of a value that JSON cannot
        hold.
        """
        self.check_consistency()
        root = Path(path)
        root.mkdir(parents=True, exist_ok=True)
        columns = {
            k: _encode(v, f"non_tensor_batch[{k!r}]") for k, v in self.non_tensor_batch.items()
        }
        record = {
            "format": 1,
            "rows": len(self),
            "tensor_keys": None if self.batch is None else self.tensor_keys(),
            "non_tensor_batch": columns,
            "meta_info": _encode(self.meta_info, "meta_info"),
        }
        # clone: safetensors refuses tensors that share a storage, which rows of one table may do
        tensors = {k: v.detach().cpu().contiguous().clone() for k, v in self._tensor_items()}
        save_file(tensors, root / TENSOR_FILE)
        (root / JSON_FILE).write_text(json.dumps(record), encoding="utf-8")

    @classmethod
    def load_from_disk(cls, path: str | Path) -> "DataProto":
        """Read what ``save_to_disk`` wrote.

        Raises ``ValueError`` when the two files do not fit together.
        """
        root = Path(path)
        record = json.loads((root / JSON_FILE).read_text(encoding="utf-8"))
        tensors = load_file(root / TENSOR_FILE)
        keys = record["tensor_keys"]
        if set(keys or []) != set(tensors):
            raise ValueError(
                f"{root}: {TENSOR_FILE} holds {sorted(tensors)}, {JSON_FILE} names {keys}"
            )
        columns = {k: _decode(v) for k, v in record["non_tensor_batch"].items()}
        data = cls.from_dict(
            {k: tensors[k] for k in keys or []}, columns, _decode(record["meta_info"])
        )
        if len(data) != record["rows"]:
            raise ValueError(f"{root}: {record['rows']} rows announced, {len(data)} found")
        return data


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Repeat rows from the start until the length is a multiple of ``size_divisor``.

    Returns ``(padded, pad_size)``; an empty table and one that divides already come back as they
    are, with 0.
    """
    if size_divisor < 1:
        raise ValueError(f"size_divisor must be at least 1, got {size_divisor}")
    pad_size = -len(data) % size_divisor
    if not pad_size:
        return data, 0
    return data.select_idxs(np.arange(len(data) + pad_size) % len(data)), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Drop the last ``pad_size`` rows."""
    if not 0 <= pad_size <= len(data):
        raise ValueError(f"cannot drop {pad_size} of {len(data)} rows")
    return data[: len(data) - pad_size] if pad_size else data


def _cat(key: str, parts: list[torch.Tensor]) -> torch.Tensor:
    shapes = {tuple(part.shape[1:]) for part in parts}
    dtypes = {part.dtype for part in parts}
    if len(shapes) > 1 or len(dtypes) > 1:
        found = f"row shapes {sorted(shapes)} and dtypes {sorted(map(str, dtypes))}"
        raise ValueError(f"concat: batch[{key!r}] has {found}; pad or cast first")
    return torch.cat(parts)


def _device_of(batch: TensorDict) -> torch.device:
    return next((tensor.device for tensor in batch.values()), torch.device("cpu"))


def _to_buffer(tensor: torch.Tensor) -> tuple[np.ndarray, str]:
    """A contiguous numpy view (or copy) of the rows alone, with the name of the dtype they stand
    for.
    """
    tensor = tensor.detach().to("cpu").contiguous()
    name = str(tensor.dtype).removeprefix("torch.")
    try:
        return tensor.numpy(), name
    except TypeError:  # bfloat16 and the float8 family have no numpy dtype
        return tensor.view(_SHIPPED_AS[tensor.element_size()]).numpy(), name


def _from_buffer(array: np.ndarray, name: str) -> torch.Tensor:
    tensor = torch.from_numpy(_writable(array))
    dtype = getattr(torch, name)
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


def _writable(array: np.ndarray) -> np.ndarray:
    # buffers in Ray's object store are read-only, and writing to them through a tensor would crash
    # the process
    return array if array.flags.writeable else array.copy()


def _encode(value: Any, place: str) -> Any:
    """JSON form of ``value``; ``{"__kind__": ..., "value": ...}`` where JSON has no such type."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return _encode(value.item(), place)
    if isinstance(value, np.ndarray):
        flat = [_encode(v, f"{place}[{i}]") for i, v in enumerate(value.ravel())]
        return {
            "__kind__": "ndarray",
            "value": flat,
            "dtype": value.dtype.str,
            "shape": list(value.shape),
        }
    if isinstance(value, (list, tuple)):
        items = [_encode(v, f"{place}[{i}]") for i, v in enumerate(value)]
        return items if isinstance(value, list) else {"__kind__": "tuple", "value": items}
    if isinstance(value, dict):
        if all(isinstance(k, str) for k in value) and "__kind__" not in value:
            return {k: _encode(v, f"{place}[{k!r}]") for k, v in value.items()}
        pairs = [[_encode(k, place), _encode(v, f"{place}[{k!r}]")] for k, v in value.items()]
        return {"__kind__": "dict", "value": pairs}
    raise TypeError(f"{place} is a {type(value).__name__}, which cannot be stored as JSON")


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(v) for v in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("__kind__")
    if kind is None:
        return {k: _decode(v) for k, v in value.items()}
    if kind == "dict":
        return {_decode(k): _decode(v) for k, v in value["value"]}
    items = [_decode(v) for v in value["value"]]
    if kind == "tuple":
        return tuple(items)
    dtype = np.dtype(value["dtype"])
    flat = object_array(items) if dtype.hasobject else np.array(items, dtype=dtype)
    return flat.reshape(value["shape"])
