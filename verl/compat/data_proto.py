"""Methods of ``DataProto`` that scripts written for verl call: mini-batches, saving and loading.

Object columns are stored as JSON, because this framework does not unpickle files.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file, save_file

from verl.columns import object_array, require_keys
from verl.protocol import DataProto

TENSOR_FILE = "batch.safetensors"
JSON_FILE = "data.json"
# Key that marks the JSON form of tuples, arrays, and dicts whose keys are not strings.
_TYPE_KEY = "__kind__"


def make_iterator(
    data: DataProto,
    mini_batch_size: int,
    epochs: int = 1,
    seed: int | None = None,
    dataloader_kwargs: Mapping[str, Any] | None = None,
) -> Iterator[DataProto]:
    """Return an iterator over the mini-batches of ``epochs`` epochs.

    ``dataloader_kwargs={"shuffle": True}`` draws a new permutation for each epoch from ``seed``.
    Raises ``ValueError`` if the length is not a multiple of ``mini_batch_size``.
    """
    options = {"shuffle": False, **(dataloader_kwargs or {})}
    require_keys("make_iterator's dataloader_kwargs", options, ["shuffle"])
    if mini_batch_size < 1 or len(data) % mini_batch_size:
        raise ValueError(
            f"{len(data)} rows are not a multiple of mini_batch_size={mini_batch_size}"
        )
    rng = np.random.default_rng(seed)
    row_orders = (
        rng.permutation(len(data)) if options["shuffle"] else np.arange(len(data))
        for _ in range(epochs)
    )
    return (
        data.select_idxs(row_order[start : start + mini_batch_size])
        for row_order in row_orders
        for start in range(0, len(data), mini_batch_size)
    )


def save_to_disk(data: DataProto, path: str | Path) -> None:
    """Write ``data`` into the directory ``path``: tensors as safetensors, other values as JSON.

    Loading restores all values but numpy scalars, which become Python numbers. Raises ``TypeError``
    for a value that cannot be stored as JSON; the message names its column or key.
    """
    data.check_consistency()
    root = Path(path)
    root.mkdir(parents=True, exist_ok=True)
    columns = {
        key: to_json_value(column, f"non_tensor_batch[{key!r}]")
        for key, column in data.non_tensor_batch.items()
    }
    json_content = {
        "format": 1,
        "rows": len(data),
        "tensor_keys": data.tensor_keys(),
        "non_tensor_batch": columns,
        "meta_info": to_json_value(data.meta_info, "meta_info"),
    }
    # Clone: columns may share memory, and safetensors refuses tensors that do.
    tensors = {
        key: tensor.detach().cpu().contiguous().clone() for key, tensor in data.batch.items()
    }
    save_file(tensors, root / TENSOR_FILE)
    (root / JSON_FILE).write_text(json.dumps(json_content), encoding="utf-8")


def load_from_disk(path: str | Path) -> DataProto:
    """Return the ``DataProto`` that ``save_to_disk`` wrote into the directory ``path``.

    Raises ``ValueError`` if the tensor file and the JSON file do not belong together.
    """
    root = Path(path)
    json_content = json.loads((root / JSON_FILE).read_text(encoding="utf-8"))
    stored_tensors = load_file(root / TENSOR_FILE)
    # Earlier versions wrote null for a table without tensors.
    tensor_keys = json_content["tensor_keys"] or []
    if set(tensor_keys) != set(stored_tensors):
        raise ValueError(
            f"{root}: {TENSOR_FILE} holds {sorted(stored_tensors)}, {JSON_FILE} names {tensor_keys}"
        )
    tensors = {key: stored_tensors[key] for key in tensor_keys}
    columns = {key: from_json_value(v) for key, v in json_content["non_tensor_batch"].items()}
    data = DataProto.from_dict(tensors, columns, from_json_value(json_content["meta_info"]))
    if len(data) != json_content["rows"]:
        raise ValueError(f"{root}: {json_content['rows']} rows announced, {len(data)} found")
    return data


def to_json_value(value: object, location: str) -> Any:
    """Convert ``value`` to values of JSON; a tuple becomes ``{"__kind__": "tuple", "value": ...}``.

    Raises ``TypeError`` for a value that cannot be converted; ``location`` names it in the message.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return to_json_value(value.item(), location)
    if isinstance(value, dict):
        values = [to_json_value(item, f"{location}[{key!r}]") for key, item in value.items()]
        # A user's dict with the key "__kind__" would look like the JSON form of a tuple or array.
        if all(isinstance(key, str) for key in value) and _TYPE_KEY not in value:
            return dict(zip(value, values, strict=True))
        keys = [to_json_value(key, location) for key in value]
        return {_TYPE_KEY: "dict", "value": [list(pair) for pair in zip(keys, values, strict=True)]}
    if not isinstance(value, (list, tuple, np.ndarray)):
        raise TypeError(f"{location} is a {type(value).__name__}, which cannot be stored as JSON")
    items = value.ravel() if isinstance(value, np.ndarray) else value
    json_items = [to_json_value(item, f"{location}[{i}]") for i, item in enumerate(items)]
    if isinstance(value, np.ndarray):
        shape = list(value.shape)
        return {_TYPE_KEY: "ndarray", "value": json_items, "dtype": value.dtype.str, "shape": shape}
    return {_TYPE_KEY: "tuple", "value": json_items} if isinstance(value, tuple) else json_items


def from_json_value(value: object) -> Any:
    """Invert ``to_json_value``; numpy scalars become Python numbers."""
    if isinstance(value, list):
        return [from_json_value(item) for item in value]
    if not isinstance(value, dict):
        return value
    type_name = value.get(_TYPE_KEY)
    if type_name is None:
        return {key: from_json_value(item) for key, item in value.items()}
    if type_name == "dict":
        return {from_json_value(key): from_json_value(item) for key, item in value["value"]}
    items = [from_json_value(item) for item in value["value"]]
    if type_name == "tuple":
        return tuple(items)
    dtype = np.dtype(value["dtype"])
    flat_array = object_array(items) if dtype.hasobject else np.array(items, dtype=dtype)
    return flat_array.reshape(value["shape"])
