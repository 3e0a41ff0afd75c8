"""DataProto: create, select, join, send and store rows."""

import io
import pickle

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict

import verl
from tests.helpers.refusals import mentions, suggests
from verl.protocol import (
    DataProto,
    DataProtoItem,
    collate_fn,
    object_array,
    pad_dataproto_to_divisor,
    union_tensor_dict,
    unpad_dataproto,
)


@pytest.fixture
def data() -> DataProto:
    return DataProto.from_dict(
        tensors={"x": torch.arange(12).view(4, 3), "w": torch.tensor([0.0, 0.5, 1.0, 1.5])},
        non_tensors={"uid": ["a", "a", "b", "b"], "steps": [[1, 2], [3, 4], [5, 6], [7, 8]]},
        meta_info={"temperature": 0.7},
    )


def first_column(table: DataProto) -> list[int]:
    return table.batch["x"][:, 0].tolist()


def test_package_exports_the_class():
    assert verl.DataProto is DataProto


def test_lists_of_equal_length_stay_one_object_per_row(data):
    assert data.non_tensor_batch["steps"].shape == (4,)
    assert data.non_tensor_batch["steps"][2] == [5, 6]
    assert object_array([(1, 2), (3, 4)]).tolist() == [(1, 2), (3, 4)]


def test_from_single_dict_separates_tensors_from_other_columns():
    table = DataProto.from_single_dict(
        {"x": torch.zeros(2, 3), "n": np.array([1, 2]), "s": ["p", "q"]}, {"m": 1}
    )
    assert table.tensor_keys() == ["x"] and list(table.non_tensor_batch) == ["n", "s"]
    assert table.non_tensor_batch["n"].dtype == np.int64 and table.meta_info == {"m": 1}
    assert "2 rows" in repr(table) and "[2, 3] float32" in repr(table)


@pytest.mark.parametrize(
    ("tensors", "others", "error", "parts"),
    [
        ({"x": torch.zeros(2), "y": torch.zeros(3)}, {}, ValueError, ["'x': 2, 'y': 3"]),
        ({"x": torch.zeros(2)}, {"u": ["a"]}, ValueError, [2, "'u': 1"]),
        ({}, {"u": ["a"], "v": ["a", "b"]}, ValueError, ["'v': 2"]),
        ({"x": torch.tensor(1.0)}, {}, ValueError, ["scalar"]),
        ({"x": [1, 2]}, {}, TypeError, ["'x'", "list"]),
        ({}, {"u": "ab"}, TypeError, ["'u'"]),
        ({}, {"u": np.array(3)}, ValueError, ["scalar"]),
    ],
)
def test_invalid_columns_are_refused(tensors, others, error, parts):
    with pytest.raises(error, check=mentions(*parts)):
        DataProto.from_dict(tensors, others)


def test_column_of_wrong_length_is_refused_when_rows_are_sent(data):
    data.non_tensor_batch["late"] = np.zeros(3)
    for use in (pickle.dumps, lambda d: d[:2], lambda d: DataProto.concat([d])):
        with pytest.raises(ValueError, check=mentions("late")):
            use(data)


def test_indexing_by_position_slice_list_array_and_mask(data):
    row = data[-1]
    assert isinstance(row, DataProtoItem) and row.batch["x"].tolist() == [9, 10, 11]
    assert row.non_tensor_batch == {"uid": "b", "steps": [7, 8]} and row.meta_info == data.meta_info
    assert first_column(data[1:3]) == [3, 6] and first_column(data[::2]) == [0, 6]
    assert first_column(data[[3, 0, 0]]) == [9, 0, 0]
    assert first_column(data[np.array([-1, 1])]) == [9, 3]
    assert first_column(data[torch.tensor([2])]) == [6]
    assert first_column(data[data.batch["w"] > 0.7]) == [6, 9]
    assert first_column(data[np.array([True, False, False, True])]) == [0, 9]
    assert len(data[[]]) == 0 and data[[]].non_tensor_batch["uid"].tolist() == []


def test_wrong_indices_are_named(data):
    with pytest.raises(IndexError, check=mentions("row 4")):
        data[4]
    with pytest.raises(IndexError, check=mentions(9)):
        data[[0, 9]]
    with pytest.raises(IndexError, check=mentions(3)):
        data[np.array([True, False, True])]
    with pytest.raises(IndexError, check=mentions("float")):
        data[np.array([0.5])]
    with pytest.raises(IndexError, check=mentions("shape")):
        data[np.zeros((2, 2), dtype=int)]
    with pytest.raises(TypeError, check=mentions(".batch['x']")):
        data["x"]


def test_selections_do_not_share_their_meta_info(data):
    for part in (data[:2], data[[0]], data.select("x"), data.chunk(2)[0]):
        part.meta_info["temperature"] = 9
    assert data.meta_info == {"temperature": 0.7}


def test_select_pop_and_rename(data):
    chosen = data.select(batch_keys=["w"], non_tensor_batch_keys=[], meta_info_keys=[])
    assert chosen.keys() == ["w"] and chosen.meta_info == {} and len(chosen) == 4
    assert data.select(batch_keys=[]).keys() == ["uid", "steps"]
    popped = data.pop("w", ["uid"], "temperature")
    assert popped.keys() == ["w", "uid"] and popped.meta_info == {"temperature": 0.7}
    assert data.keys() == ["x", "steps"] and data.meta_info == {}
    assert data.rename(["x", "steps"], ["prompts", "records"]) is data
    assert data.keys() == ["prompts", "records"]
    assert data.pop("prompts").keys() == ["prompts"] and data.tensor_keys() == [] and len(data) == 4


def test_table_without_tensors_has_a_batch_of_its_row_count(data):
    names = DataProto.from_dict({}, {"uid": ["a", "b", "c"]})
    assert names.batch.batch_size == (3,) and list(names.batch.keys()) == []
    assert names[1:].batch.batch_size == (2,) and names[[0, 0]].batch.batch_size == (2,)
    assert names[0].batch.batch_size == () and names[0].non_tensor_batch == {"uid": "a"}
    assert DataProto().batch.batch_size == (0,) and len(DataProto()) == 0
    assert data.select([]).batch.batch_size == (4,) and data.select([], []).batch.batch_size == (0,)
    assert DataProto.concat([names, names]).batch.batch_size == (6,)
    loaded = pickle.loads(pickle.dumps(names))
    assert loaded.batch.batch_size == (3,) and len(loaded) == 3
    names.batch["x"] = torch.arange(3)
    assert names.keys() == ["x", "uid"] and len(names) == 3


def test_empty_batch_takes_the_length_of_the_columns():
    table = DataProto()
    table.non_tensor_batch["uid"] = object_array(["a", "b"])
    assert (
        len(table) == 2 and len(table[[0, 1, 1]]) == 3 and table[1].non_tensor_batch["uid"] == "b"
    )
    assert [len(part) for part in table.chunk(2)] == [1, 1]
    assert DataProto().union(table).batch.batch_size == (2,)
    assert table.union(DataProto.from_dict({"x": torch.zeros(2)})).keys() == ["x", "uid"]
    table.pop("x")
    assert table.batch.batch_size == (2,)
    table.pop(non_tensor_batch_keys="uid")
    assert table.batch.batch_size == (0,) and len(table) == 0


def test_unknown_keys_name_the_nearest():
    table = DataProto.from_dict({"response_mask": torch.zeros(1)}, {"traj_uid": ["t"]})
    with pytest.raises(KeyError, check=suggests("response_mask")):
        table.select("respons_mask")
    with pytest.raises(KeyError, check=suggests("traj_uid")):
        table.pop(non_tensor_batch_keys=["traj_id"])
    with pytest.raises(KeyError, check=mentions("meta_info", "'metrics'")):
        table.select(meta_info_keys=["metrics"])
    with pytest.raises(KeyError, check=mentions("traj_uid")):
        table.rename("trajuid", "uid")
    assert table.keys() == ["response_mask", "traj_uid"]


def test_rename_refuses_taken_names_and_can_swap(data):
    with pytest.raises(ValueError, check=mentions("uid")):
        data.rename("x", "uid")
    with pytest.raises(ValueError, check=mentions(1, 2)):
        data.rename("x", ["y", "z"])
    data.rename(["x", "w"], ["w", "x"])
    assert data.batch["w"].shape == (4, 3) and data.batch["x"].shape == (4,)


def test_concat_restores_split_rows(data):
    parts = data.split(3)
    assert [len(part) for part in parts] == [3, 1]
    parts[1].meta_info = {"temperature": 1.0, "late": 1}
    joined = DataProto.concat(parts)
    assert first_column(joined) == [0, 3, 6, 9]
    assert joined.non_tensor_batch["steps"].tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert joined.meta_info == {"temperature": 0.7, "late": 1}


def test_concat_joins_the_metrics_of_all_parts():
    first = {"loss": 1.0, "seen": [1, 2], "of": {"a": 1.0}, "only": 5.0}
    second = {"loss": torch.tensor(3.0), "seen": np.array([3]), "of": {"a": 2.0, "b": 3.0}}
    parts = [DataProto(meta_info={"metrics": m, "step": i}) for i, m in enumerate((first, second))]
    joined = DataProto.concat([*parts, DataProto(meta_info={"late": 1})]).meta_info
    assert joined == {
        "metrics": {
            "loss": [1.0, 3.0],
            "seen": [1, 2, 3],
            "of": {"a": [1.0, 2.0], "b": [3.0]},
            "only": [5.0],
        },
        "step": 0,
        "late": 1,
    }
    assert first["loss"] == 1.0  # the parts are not changed


def test_metrics_of_a_split_table_count_once(data):
    data.meta_info["metrics"] = {"loss": 1.0}
    assert DataProto.concat(data.split(1)).meta_info["metrics"] == {"loss": 1.0}
    assert DataProto.concat([DataProto(), data]).meta_info["metrics"] == {"loss": 1.0}


@pytest.mark.parametrize(
    ("column", "parts"),
    [
        (TensorDict({"a": torch.ones(2), "b": torch.ones(2)}, batch_size=[2]), ["(a, b"]),
        (
            torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
            ["jagged", "to_padded_tensor"],
        ),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), ["jagged"]),
        (torch.eye(2).to_sparse(), ["sparse_coo", "to_dense"]),
        (NonTensorData("text", batch_size=[2]), ["'x'"]),
    ],
)
def test_unsupported_columns_are_refused_at_construction(column, parts):
    with pytest.raises(TypeError, check=mentions(*parts)):
        DataProto.from_dict({"x": column})
    with pytest.raises(TypeError, check=mentions("batch['x']")):
        DataProto(TensorDict({"x": column}, batch_size=[2]))
    table = DataProto.from_dict({"y": torch.ones(2)})
    table.batch["x"] = column
    # A column that is set later is checked when the table is pickled.
    with pytest.raises(TypeError, check=mentions("batch['x']")):
        pickle.dumps(table)


def test_concat_refuses_parts_that_do_not_match(data):
    with pytest.raises(ValueError, check=mentions("['w']")):
        DataProto.concat([data, data.select("x")])
    wide = DataProto.from_dict({"x": torch.zeros(1, 5, dtype=torch.long)})
    with pytest.raises(ValueError, check=mentions("'x'", "(3,)", "(5,)")):
        DataProto.concat([data.select("x", []), wide])
    with pytest.raises(ValueError, check=mentions("concat")):
        DataProto.concat([])
    only_meta = DataProto.concat(
        [DataProto(meta_info={"a": 1}), DataProto(meta_info={"a": 2, "b": 3})]
    )
    assert len(only_meta) == 0 and only_meta.meta_info == {"a": 1, "b": 3}


def test_union_joins_columns_and_refuses_contradictions(data):
    other = DataProto.from_dict(
        {"w": data.batch["w"].clone(), "v": torch.ones(4)}, {"uid": ["a", "a", "b", "b"]}
    )
    assert data.union(other) is data
    assert data.keys() == ["x", "w", "v", "uid", "steps"]
    for contradiction in (
        DataProto.from_dict({"w": torch.ones(4)}),
        DataProto.from_dict({}, {"uid": ["a", "a", "b", "c"]}),
        DataProto(meta_info={"temperature": 1.0}),
        DataProto.from_dict({"z": torch.ones(3)}),
        DataProto.from_dict({"uid": torch.ones(4)}),
    ):
        with pytest.raises(ValueError, check=mentions("union")):
            data.union(contradiction)
    assert data.keys() == ["x", "w", "v", "uid", "steps"] and data.meta_info == {"temperature": 0.7}


def test_union_treats_nan_as_equal_to_nan():
    values = {
        "n": np.array([float("nan"), 1.0]),
        "deep": [{"score": float("nan")}, [np.array([1, 2])]],
    }
    first = DataProto.from_dict({"t": torch.tensor([1.0, float("nan")])}, values)
    second = DataProto.from_dict(
        {"t": torch.tensor([1.0, float("nan")])},
        {"n": np.array([float("nan"), 1.0]), "deep": [{"score": float("nan")}, [np.array([1, 2])]]},
    )
    assert first.union(second).keys() == ["t", "n", "deep"]


def test_union_tensor_dict_does_not_change_its_arguments():
    one, two = TensorDict({"a": torch.ones(2)}, [2]), TensorDict({"b": torch.ones(2)}, [2])
    assert set(union_tensor_dict(one, two).keys()) == {"a", "b"}
    assert set(one.keys()) == {"a"}
    with pytest.raises(ValueError, check=mentions("[2]", "[3]")):
        union_tensor_dict(one, TensorDict({"a": torch.ones(3)}, [3]))


def test_repeat_in_both_orders(data):
    assert first_column(data.repeat(2, interleave=True)) == [0, 0, 3, 3, 6, 6, 9, 9]
    tiled = data.repeat(2, interleave=False)
    assert first_column(tiled) == [0, 3, 6, 9] * 2
    assert tiled.non_tensor_batch["uid"].tolist() == ["a", "a", "b", "b"] * 2
    with pytest.raises(ValueError, check=mentions(1)):
        data.repeat(0)


def test_reorder_permutes_in_place(data):
    data.reorder(torch.tensor([2, 0, 3, 1]))
    assert first_column(data) == [6, 0, 9, 3]
    assert data.non_tensor_batch["uid"].tolist() == ["b", "a", "b", "a"]
    with pytest.raises(ValueError, check=mentions("reorder")):
        data.reorder([0, 0, 1, 2])


def test_chunk_needs_equal_parts(data):
    assert [first_column(part) for part in data.chunk(2)] == [[0, 3], [6, 9]]
    with pytest.raises(ValueError, check=mentions(4, 3, "pad_dataproto_to_divisor")):
        data.chunk(3)
    with pytest.raises(ValueError, check=mentions(1)):
        data.split(0)


def test_padding_repeats_rows_and_is_removed(data):
    padded, pad_size = pad_dataproto_to_divisor(data[:3], 8)
    assert pad_size == 5 and first_column(padded) == [0, 3, 6, 0, 3, 6, 0, 3]
    assert first_column(unpad_dataproto(padded, pad_size)) == [0, 3, 6]
    assert pad_dataproto_to_divisor(data, 2) == (data, 0) and unpad_dataproto(data, 0) is data
    assert pad_dataproto_to_divisor(DataProto(), 2)[1] == 0
    with pytest.raises(ValueError, check=mentions(5, 4)):
        unpad_dataproto(data, 5)


def test_iterator_visits_every_row_once_per_epoch(data):
    assert [first_column(part) for part in data.make_iterator(2, epochs=2)] == [[0, 3], [6, 9]] * 2
    shuffled = list(data.make_iterator(2, 3, seed=1, dataloader_kwargs={"shuffle": True}))
    again = list(data.make_iterator(2, 3, seed=1, dataloader_kwargs={"shuffle": True}))
    assert [first_column(p) for p in shuffled] == [first_column(p) for p in again]
    epochs = [first_column(DataProto.concat(shuffled[i : i + 2])) for i in (0, 2, 4)]
    assert all(sorted(epoch) == [0, 3, 6, 9] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    with pytest.raises(ValueError, check=mentions("mini_batch_size=3")):
        data.make_iterator(3)
    with pytest.raises(KeyError, check=mentions("shuffle")):
        data.make_iterator(2, dataloader_kwargs={"shufle": True})


def test_to_moves_tensors_in_place(data):
    assert data.to("meta") is data and data.batch["x"].device.type == "meta"


def test_collate_stacks_tensors_and_lists_other_values():
    columns = collate_fn([{"x": torch.ones(2), "n": 1}, {"x": torch.zeros(2), "n": [2]}])
    table = DataProto.from_single_dict(columns)
    assert table.batch["x"].shape == (2, 2) and table.non_tensor_batch["n"].tolist() == [1, [2]]
    with pytest.raises(KeyError, check=mentions("sample 1")):
        collate_fn([{"x": 1}, {"y": 1}])
    with pytest.raises(ValueError, check=mentions("collate_fn")):
        collate_fn([])


def test_pickled_slice_contains_only_its_rows():
    large = DataProto.from_dict({"x": torch.zeros(1000, 1000)})
    assert len(pickle.dumps(large[:2])) < 20_000
    assert len(pickle.dumps(DataProto.from_dict({"x": torch.zeros(1).expand(5, 4)}))) < 2_000


def test_unpickled_tables_keep_dtypes_and_are_writable():
    dtypes = [
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.int64,
        torch.bool,
        torch.float8_e4m3fn,
    ]
    table = DataProto.from_dict({str(d): torch.ones(2, 3).to(d) for d in dtypes}, {"u": ["a", "b"]})
    table.batch["strided"] = torch.arange(6.0).view(3, 2).t()
    table.batch["grad"] = torch.ones(2, requires_grad=True)
    buffers = []
    payload = pickle.dumps(table, protocol=5, buffer_callback=buffers.append)
    # As in Ray: buffers are out of band, and read-only on arrival.
    loaded = pickle.loads(payload, buffers=[memoryview(b.raw()).toreadonly() for b in buffers])
    assert {k: v.dtype for k, v in loaded.batch.items()} == {
        k: v.dtype for k, v in table.batch.items()
    }
    assert loaded.batch["strided"].tolist() == [[0, 2, 4], [1, 3, 5]]
    assert all(
        torch.equal(loaded.batch[k].float(), table.batch[k].float()) for k in table.tensor_keys()
    )
    loaded.batch["torch.float32"].fill_(7)
    assert table.batch["torch.float32"].max() == 1


def test_tables_are_stored_and_loaded_without_pickle(tmp_path, data):
    data.batch["half"] = torch.ones(4, 2, dtype=torch.bfloat16)
    data.batch["alias"] = data.batch["half"]
    data.non_tensor_batch["won"] = np.array([True, False, True, False])
    data.non_tensor_batch["reward"] = np.array([0.1, np.nan, 2, 3], dtype=np.float32)
    data.non_tensor_batch["rec"] = object_array(
        [{"span": (1, 2), 3: None}, {"a": np.arange(2)}, np.float32(2), "é"]
    )
    data.meta_info["metrics"] = {"nested": [1, {"__kind__": "mine"}]}
    data.save_to_disk(tmp_path / "rows")
    loaded = DataProto.load_from_disk(tmp_path / "rows")
    assert loaded.keys() == data.keys() and loaded.meta_info == data.meta_info
    assert all(torch.equal(loaded.batch[k], data.batch[k]) for k in data.tensor_keys())
    assert (
        loaded.non_tensor_batch["won"].dtype == bool
        and loaded.non_tensor_batch["reward"].dtype == np.float32
    )
    assert np.array_equal(
        loaded.non_tensor_batch["reward"], data.non_tensor_batch["reward"], equal_nan=True
    )
    assert loaded.non_tensor_batch["rec"][0] == {"span": (1, 2), 3: None}
    assert loaded.non_tensor_batch["rec"][1]["a"].tolist() == [0, 1]
    assert loaded.non_tensor_batch["steps"].tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]]
    files = sorted(p.name for p in (tmp_path / "rows").iterdir())
    assert files == ["batch.safetensors", "data.json"]


def test_value_that_json_cannot_store_is_named(tmp_path):
    table = DataProto.from_dict({}, {"steps": [[1], [io.StringIO()]]})
    with pytest.raises(TypeError, check=mentions("non_tensor_batch['steps'][1][0]", "StringIO")):
        table.save_to_disk(tmp_path / "rows")


def test_stored_parts_that_do_not_match_are_refused(tmp_path, data):
    data.save_to_disk(tmp_path / "one")
    data.select("x").save_to_disk(tmp_path / "two")
    (tmp_path / "two" / "batch.safetensors").replace(tmp_path / "one" / "batch.safetensors")
    with pytest.raises(ValueError, check=mentions("batch.safetensors")):
        DataProto.load_from_disk(tmp_path / "one")


def test_empty_tables_are_pickled_and_stored(tmp_path):
    for table in (
        DataProto(meta_info={"a": 1}),
        DataProto.from_dict({"x": torch.zeros(0, 3)}, {"u": []}),
    ):
        table.save_to_disk(tmp_path / str(len(table.keys())))
        for loaded in (
            pickle.loads(pickle.dumps(table)),
            DataProto.load_from_disk(tmp_path / str(len(table.keys()))),
        ):
            assert (
                loaded.keys() == table.keys()
                and len(loaded) == 0
                and loaded.meta_info == table.meta_info
            )
