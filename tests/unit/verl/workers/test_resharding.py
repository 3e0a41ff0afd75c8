"""Tests of resuming on another number of ranks: the same weights and moments, and the same
update.
"""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

from tests.helpers.policy_rows import random_rows
from tests.helpers.ranks import run_two_ranks
from tests.helpers.refusals import mentions
from tests.helpers.tiny_model import make_tiny_policy
from verl.config.schema.model import FSDPConfig, OptimConfig
from verl.config.settings import ConfigError
from verl.models.loader import load_causal_lm
from verl.models.policy import ValueModel
from verl.workers.collectives import get_rank, world_size
from verl.workers.engine import TrainEngine
from verl.workers.engine_state import (
    check_engine_records,
    gather_full_weights,
    load_engine,
    read_weights,
    save_engine,
)
from verl.workers.rows import Rows

# A larger eps than the default: AdamW would turn rounding errors into whole steps.
OPTIM = OptimConfig(lr=1e-2, eps=1e-2)
ONE, TWO, COPIES = "of one rank", "of two ranks", "of two ranks with a copy each"
SHARDS = "shard-0000{}-*"


def make_engine(policy: Path, fsdp_size: int = -1) -> TrainEngine:
    """Return an engine of a value model. Its head has one row, so the second rank holds none of
    it.
    """
    fsdp = FSDPConfig(fsdp_size=fsdp_size)
    model = ValueModel(load_causal_lm(policy, purpose="value"))
    return TrainEngine(model, device="cpu", fsdp=fsdp, optim=OPTIM)


def train(engine: TrainEngine, *seeds: int) -> None:
    for seed in seeds:
        rows = Rows(random_rows(rows=4, seed=seed))
        packed = rows.pack_rows(range(len(rows)))
        index = rows.sampled_targets(packed, range(len(rows))).predicting_positions
        values = engine.module(packed.input_ids, packed.position_ids, packed.layout, index)
        # Every rank has all rows, and the losses of the ranks are summed.
        engine.backward((values - 1.0).square().mean() / world_size(), is_last_micro_batch=True)
        assert math.isfinite(engine.step().grad_norm)


def gather_state(engine: TrainEngine) -> dict[str, torch.Tensor]:
    """Return unsharded weights and moments. This is a collective call."""
    assert engine.optimizer is not None
    sharded: dict[str, torch.Tensor] = dict(engine.module.named_parameters())
    for name, parameter in engine.module.named_parameters():
        for key, value in engine.optimizer.state[parameter].items():
            sharded[f"{name}|{key}"] = value
    whole: dict[str, torch.Tensor] = {}
    for name, tensor in sharded.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        whole[name] = full.detach().clone()
    return whole


def save_and_train(engine: TrainEngine, directory: Path, name: str) -> None:
    """Save a checkpoint, the state that it should hold, and the state one step later."""
    train(engine, 0, 1)
    save_engine(engine, directory / name).wait_for_files()
    save_state(engine, directory, f"{name}.saved")
    train(engine, 2)
    save_state(engine, directory, f"{name}.trained")


def resume_and_train(engine: TrainEngine, directory: Path, name: str, ranks: int) -> None:
    torch.manual_seed(99)
    before = torch.get_rng_state()
    load_engine(engine, directory / name)
    is_unchanged = torch.equal(torch.get_rng_state(), before)
    (directory / f"{name}.kept-by-{get_rank()}-of-{ranks}.json").write_text(
        json.dumps(is_unchanged)
    )
    save_state(engine, directory, f"{name}.loaded-by-{ranks}")
    train(engine, 2)
    save_state(engine, directory, f"{name}.trained-by-{ranks}")


def save_state(engine: TrainEngine, directory: Path, name: str) -> None:
    state = gather_state(engine)
    if get_rank() == 0:
        save_file(state, directory / f"{name}.safetensors")


def run_rank(number: int, policy: Path, directory: Path) -> None:
    dist.init_process_group("gloo")
    save_and_train(make_engine(policy), directory, TWO)
    save_and_train(make_engine(policy, fsdp_size=1), directory, COPIES)
    resume_and_train(make_engine(policy), directory, ONE, ranks=2)
    resume_and_train(make_engine(policy), directory, COPIES, ranks=2)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"), hidden=32, layers=1, std=0.2)


@pytest.fixture(scope="module")
def saved(policy, tmp_path_factory):
    """Return the directory with the checkpoints of one rank and two, and the results of resuming
    each.
    """
    directory = tmp_path_factory.mktemp("saved")
    save_and_train(make_engine(policy), directory, ONE)
    run_two_ranks(run_rank, policy, directory)
    for name in (TWO, COPIES):
        resume_and_train(make_engine(policy), directory, name, ranks=1)
    return directory


@pytest.mark.parametrize(("name", "ranks"), [(ONE, 2), (TWO, 1), (COPIES, 1), (COPIES, 2)])
def test_another_number_of_ranks_resumes_from_the_same_numbers(saved, name, ranks):
    state = {part: load_file(saved / f"{name}.{part}.safetensors") for part in ("saved", "trained")}
    loaded = load_file(saved / f"{name}.loaded-by-{ranks}.safetensors")
    after = load_file(saved / f"{name}.trained-by-{ranks}.safetensors")
    assert loaded.keys() == state["saved"].keys()
    for key, tensor in state["saved"].items():
        assert torch.equal(loaded[key], tensor), key
        torch.testing.assert_close(after[key], state["trained"][key], atol=2e-6, rtol=1e-4, msg=key)
    assert not all(torch.equal(after[key], loaded[key]) for key in loaded)


def test_ranks_write_disjoint_shards(saved):
    whole = load_file(saved / f"{TWO}.saved.safetensors")
    expected = sum(tensor.numel() for tensor in whole.values())
    sizes = [
        sum(count_numbers(file) for file in (saved / TWO).glob(SHARDS.format(number)))
        for number in (1, 2)
    ]
    assert sum(sizes) == expected and min(sizes) > 0.4 * expected
    assert sum(map(count_numbers, (saved / COPIES).glob(SHARDS.format(1)))) == expected
    assert not list((saved / COPIES).glob(SHARDS.format(2)))


def count_numbers(file: Path) -> int:
    return sum(tensor.numel() for tensor in load_file(file).values())


def test_torch_alone_reads_the_shards(saved):
    expected = load_file(saved / f"{TWO}.saved.safetensors")
    state = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    load(state, storage_reader=HuggingFaceStorageReader(str(saved / TWO)), no_dist=True)
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name
    weights = read_weights(saved / TWO)
    assert weights.keys() == {name for name in expected if "|" not in name}
    assert all(torch.equal(weights[name], expected[name]) for name in weights)


def test_random_states_belong_to_their_ranks(policy, saved, tmp_path):
    """A checkpoint of one rank has no state for the second rank, which keeps its own."""
    files = {number: saved / f"{ONE}.kept-by-{number}-of-2.json" for number in (0, 1)}
    unchanged = {number: json.loads(file.read_text()) for number, file in files.items()}
    assert unchanged == {0: False, 1: True}
    engine = make_engine(policy)
    torch.manual_seed(5)
    save_engine(engine, tmp_path).wait_for_files()
    drawn = torch.rand(3)
    load_engine(engine, tmp_path)
    assert torch.equal(torch.rand(3), drawn)


def test_checkpoint_without_all_ranks_is_refused(policy, saved, tmp_path):
    for missing, part in ((1, "'value_head.weight'"), (2, tmp_path / "2")):
        torn = tmp_path / str(missing)
        shutil.copytree(saved / TWO, torn)
        for file in torn.glob(SHARDS.format(missing)):
            file.unlink()
        with pytest.raises(ValueError, check=mentions(part)):
            load_engine(make_engine(policy), torn)


def test_weights_of_another_width_are_refused(saved, tmp_path):
    wide = make_tiny_policy(tmp_path / "wide", hidden=64, layers=1)
    engine = make_engine(wide)
    before = gather_full_weights(engine)
    with pytest.raises(ValueError):
        load_engine(engine, saved / TWO)
    after = gather_full_weights(engine)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_checkpoint_of_the_first_format_is_read(policy, saved, tmp_path):
    whole = load_file(saved / f"{ONE}.saved.safetensors")
    moments = {name: tensor for name, tensor in whole.items() if "|" in name}
    weights = {name: tensor for name, tensor in whole.items() if "|" not in name}
    save_file(weights, tmp_path / "weights.safetensors")
    save_file(moments, tmp_path / "optimizer.safetensors")
    for number in (0, 1):
        states = {"cpu": torch.get_rng_state()}
        save_file(states, tmp_path / f"rng_rank{number}.safetensors")
    (tmp_path / "engine.json").write_text(json.dumps({"format": 1, "steps": 2}))
    engine = make_engine(policy)
    load_engine(engine, tmp_path)
    assert engine.steps == 2
    assert all(torch.equal(tensor, whole[name]) for name, tensor in gather_state(engine).items())
    assert read_weights(tmp_path).keys() == weights.keys()


@pytest.mark.parametrize(
    ("text", "key"),
    [
        *((text, "engine.json: ") for text in ("", "[]", "[" * 100_000)),
        ('{"steps": 2}', "format"),
        *((f'{{"format": 2, "steps": {steps}}}', "steps") for steps in ("null", "-1", '"2"')),
        *((f'{{"format": 2, "steps": 2, "adapter": {a}}}', "adapter") for a in ("null", "[]")),
        ('{"format": 2, "steps": 2, "adapter": {"alpha": "8"}}', "alpha"),
    ],
)
def test_invalid_engine_state_is_refused_with_its_file(policy, tmp_path, text, key):
    save_engine(make_engine(policy), tmp_path).wait_for_files()
    (tmp_path / "engine.json").write_text(text)
    with pytest.raises(ValueError, check=mentions(tmp_path / "engine.json", key, "; fix: ")):
        read_weights(tmp_path)
    # The driver refuses the checkpoint before the workers read it.
    with pytest.raises(ConfigError, check=mentions(tmp_path / "engine.json", key, "; fix: ")):
        check_engine_records(tmp_path)


def test_unknown_format_is_refused(policy, tmp_path):
    save_engine(make_engine(policy), tmp_path).wait_for_files()
    (tmp_path / "engine.json").write_text(json.dumps({"format": 9, "steps": 2}))
    for read in (
        lambda: load_engine(make_engine(policy), tmp_path),
        lambda: read_weights(tmp_path),
    ):
        with pytest.raises(ValueError, check=mentions(9, "(1, 2)")):
            read()
