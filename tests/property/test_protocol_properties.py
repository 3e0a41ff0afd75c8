"""Properties of any table: splitting, padding, pickling and storing lose nothing."""

import pickle
import tempfile

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from verl.single_controller.base.decorator import Dispatch, MethodRegistration, plan_calls

thorough = settings(deadline=None, max_examples=60)  # no deadline, because the machine may be busy
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(allow_nan=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=6,
)


@st.composite
def tables(draw, min_rows: int = 0) -> DataProto:
    rows = draw(st.integers(min_rows, 9))
    width = draw(st.integers(0, 3))
    tensors = {
        "id": torch.arange(rows),
        "x": torch.arange(rows * width).view(rows, width).to(torch.bfloat16),
    }
    records = draw(st.lists(VALUES, min_size=rows, max_size=rows))
    scores = np.array(
        draw(st.lists(st.floats(width=32), min_size=rows, max_size=rows)), dtype=np.float32
    )
    kept_names = draw(st.sets(st.sampled_from(["x", "record", "score"])))
    columns = {k: v for k, v in {"record": records, "score": scores}.items() if k in kept_names}
    kept_tensors = {k: v for k, v in tensors.items() if k == "id" or k in kept_names}
    return DataProto.from_dict(kept_tensors, columns, {"m": draw(VALUES)})


def assert_same(a: DataProto, b: DataProto) -> None:
    assert set(a.keys()) == set(b.keys()) and len(a) == len(b)
    for key in a.tensor_keys():
        assert a.batch[key].dtype == b.batch[key].dtype and torch.equal(a.batch[key], b.batch[key])
    for key, column in a.non_tensor_batch.items():
        other_column = b.non_tensor_batch[key]
        assert column.dtype == other_column.dtype
        if column.dtype.hasobject:
            assert column.tolist() == other_column.tolist()
        else:
            assert np.array_equal(column, other_column, equal_nan=True)


@thorough
@given(tables(min_rows=1), st.integers(1, 12))
def test_splitting_and_joining_is_the_identity(table, size):
    assert_same(DataProto.concat(table.split(size)), table)


@thorough
@given(tables(min_rows=1), st.integers(1, 12))
def test_padding_and_unpadding_is_the_identity(table, divisor):
    padded, pad_size = pad_dataproto_to_divisor(table, divisor)
    assert len(padded) % divisor == 0 and 0 <= pad_size < divisor
    assert_same(unpad_dataproto(padded, pad_size), table)
    assert_same(DataProto.concat(padded.chunk(divisor)), padded)


@thorough
@given(tables(), st.data())
def test_reordering_and_its_inverse_is_the_identity(table, data):
    order = np.array(data.draw(st.permutations(range(len(table)))), dtype=int)
    moved = table[:]
    moved.reorder(order)
    assert moved.batch["id"].tolist() == order.tolist()
    moved.reorder(np.argsort(order))
    assert_same(moved, table)


@thorough
@given(tables(), st.integers(1, 4), st.booleans())
def test_every_row_is_repeated_equally_often(table, times, interleave):
    ids = table.repeat(times, interleave).batch["id"].tolist()
    assert len(ids) == times * len(table)
    expected = range(len(table))
    assert ids == (
        [i for i in expected for _ in range(times)] if interleave else [*expected] * times
    )


@thorough
@given(tables(), st.lists(st.booleans(), min_size=9, max_size=9))
def test_mask_and_complement_divide_the_rows(table, bits):
    mask = np.array(bits[: len(table)], dtype=bool)
    chosen, remaining = table[mask], table[~mask]
    assert sorted(chosen.batch["id"].tolist() + remaining.batch["id"].tolist()) == list(
        range(len(table))
    )
    assert_same(table[np.flatnonzero(mask)], chosen)


@thorough
@given(tables())
def test_pickling_is_the_identity(table):
    back = pickle.loads(pickle.dumps(table))
    assert_same(back, table)
    assert back.meta_info == table.meta_info


@thorough
@given(tables())
def test_storing_is_the_identity(table):
    with tempfile.TemporaryDirectory() as directory:
        table.save_to_disk(directory)
        back = DataProto.load_from_disk(directory)
    assert_same(back, table)
    assert back.meta_info == table.meta_info


@thorough
@given(tables(min_rows=1), st.sets(st.sampled_from(["id", "x", "record", "score"])))
def test_popped_and_remaining_columns_unite_to_the_whole(table, names):
    whole = table[:]
    remaining = table[:]
    popped = remaining.pop(
        [k for k in names if k in remaining.tensor_keys()],
        [k for k in names if k in remaining.non_tensor_batch],
    )
    assert set(popped.keys()) | set(remaining.keys()) == set(whole.keys())
    assert not set(popped.keys()) & set(remaining.keys())
    assert_same(remaining.union(popped), whole)


@thorough
@given(tables(min_rows=1), st.integers(1, 7))
def test_rows_of_the_ranks_are_collected_in_order(table, world_size):
    calls, collect = plan_calls(
        MethodRegistration(Dispatch.DP_COMPUTE_PROTO), world_size, (table,), {}
    )
    shards = [args[0] for args, _ in calls]
    assert len({len(shard) for shard in shards}) == 1
    without_padding = [shard[: len(shard) - shard.meta_info["padding_rows"]] for shard in shards]
    assert_same(DataProto.concat(without_padding), table)
    assert_same(collect(shards), table)
