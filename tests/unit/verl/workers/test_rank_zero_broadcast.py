"""Tests of models that rank 0 broadcasts to a rank without files.

Both ranks hold and learn the same numbers as two ranks that both read the files. A rank holds one
block at a time.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from tests.helpers.policy_rows import random_rows
from tests.helpers.ranks import run_two_ranks
from tests.helpers.tiny_model import make_tiny_policy
from verl.config.schema.model import FSDPConfig, OptimConfig
from verl.models.export import tied_names
from verl.models.loader import load_causal_lm
from verl.models.policy import PackedModel, PolicyModel, ValueModel
from verl.utils.seeds import seed_everything
from verl.workers import engine as engine_module
from verl.workers.collectives import check_same_model
from verl.workers.engine import TrainEngine
from verl.workers.rows import Rows

OPTIM = OptimConfig(lr=1e-2)
TIED, UNTIED, LORA, VALUES, COPIES = "tied", "untied", "lora", "values", "a copy each"
CASES = (TIED, UNTIED, LORA, VALUES, COPIES)
BROADCAST, READ = "broadcast", "read"  # only rank 0 has the files, or both ranks have them
OTHER = "other.json"


def load_model(case: str, directory: Path, empty: bool) -> PackedModel:
    path = directory / (UNTIED if case == UNTIED else TIED) / ("config" if empty else "files")
    if case == VALUES:
        return ValueModel(load_causal_lm(path, without_weights=empty, purpose="value"))
    lora = 4 if case == LORA else 0
    return PolicyModel(load_causal_lm(path, lora_rank=lora, without_weights=empty))


def train_one_step(engine: TrainEngine, case: str, rank: int) -> torch.Tensor:
    """Take a step on two rows of this rank. Return their scores or values before the step."""
    rows = Rows(random_rows(rows=2, seed=rank))
    packed = rows.pack_rows([0, 1])
    targets = rows.sampled_targets(packed, [0, 1])
    inputs = (packed.input_ids, packed.position_ids, packed.layout)
    if case == VALUES:
        scores = engine.module(*inputs, targets.predicting_positions)
        loss = (scores - 1.0).square().mean()
    else:
        scores = engine.module(*inputs, [targets])[0].log_probs
        loss = -scores.mean()
    engine.backward(loss, is_last_micro_batch=True)
    engine.step()
    return scores.detach()


def copy_state(engine: TrainEngine, prefix: str) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = {}
    for name, tensor in (*engine.module.named_parameters(), *engine.module.named_buffers()):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        state[f"{prefix} {name}"] = local.detach().clone()
    return state


def build_and_train(case: str, source: str, directory: Path, rank: int) -> None:
    seed_everything(3)
    empty = source == BROADCAST and rank > 0
    module = load_model(case, directory, empty)
    if empty:
        torch.rand(1)  # reading and building a model may draw random numbers
    on_meta = {name for name, p in module.named_parameters() if p.is_meta}
    tied = tied_names(module)
    held: list[int] = []

    def shard(part, **options):
        unsharded = {p for p in part.parameters() if not isinstance(p, DTensor)}
        held.append(sum(p.numel() for p in unsharded))
        whole = {name: p for name, p in module.named_parameters() if not isinstance(p, DTensor)}
        # Weights outside this part that are not sharded yet must still be on the meta device.
        assert {p for name, p in whole.items() if name in on_meta and not p.is_meta} <= unsharded
        assert not any(p.is_meta for p in unsharded)
        return sharded(part, **options)

    sharded, engine_module.fully_shard = engine_module.fully_shard, shard
    fsdp = FSDPConfig(fsdp_size=1 if case == COPIES else -1)
    try:
        engine = TrainEngine(module, device="cpu", fsdp=fsdp, optim=OPTIM)
    finally:
        engine_module.fully_shard = sharded
    state = copy_state(engine, "start") | {"drawn": torch.rand(3)}
    state |= {"found": train_one_step(engine, case, rank)} | copy_state(engine, "after")
    save_file(state, directory / f"{case}.{source}.{rank}.safetensors")
    note = {"meta": len(on_meta), "tied": sorted(tied), "held": held}
    (directory / f"{case}.{source}.{rank}.json").write_text(json.dumps(note))


def run_rank(rank: int, directory: Path) -> None:
    dist.init_process_group("gloo")
    for case in CASES:
        build_and_train(case, BROADCAST, directory, rank)
    message = ""
    try:
        check_same_model(load_model(UNTIED if rank else TIED, directory, empty=rank > 0))
    except RuntimeError as error:
        message = str(error)
    (directory / f"{rank}.{OTHER}").write_text(json.dumps(message))
    # Without the broadcast, both ranks keep what they read.
    engine_module.check_same_model = lambda module: None
    engine_module.share_random_state = lambda: None
    engine_module.broadcast_module = lambda part, device: None
    for case in CASES:
        build_and_train(case, READ, directory, rank)


@pytest.fixture(scope="module")
def placed(tmp_path_factory):
    """Return the directory with the results of both ranks for both sources."""
    directory = tmp_path_factory.mktemp("placed")
    for name in (TIED, UNTIED):
        files = make_tiny_policy(
            directory / name / "files", hidden=32, layers=2, std=0.2, tie=name == TIED
        )
        (directory / name / "config").mkdir()
        shutil.copy(files / "config.json", directory / name / "config")
    run_two_ranks(run_rank, directory)
    return directory


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_rank_without_files_holds_and_learns_the_same_numbers(placed, case, rank):
    states = [
        load_file(placed / f"{case}.{source}.{rank}.safetensors") for source in (BROADCAST, READ)
    ]
    actual, expected = states
    assert actual.keys() == expected.keys() and any(name.startswith("after") for name in actual)
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name
    changed = [name for name in actual if name.startswith("after ") and actual[name].numel()]
    assert any(
        not torch.equal(actual[name], actual[name.replace("after", "start")]) for name in changed
    )


@pytest.mark.parametrize("case", CASES)
def test_rank_without_files_holds_one_block_at_a_time(placed, case):
    first, second = (
        json.loads((placed / f"{case}.{BROADCAST}.{rank}.json").read_text()) for rank in (0, 1)
    )
    assert first["meta"] == 0 < second["meta"]
    assert second["tied"] == first["tied"]
    assert bool(first["tied"]) == (case in (TIED, LORA, COPIES))
    assert second["held"] == first["held"] and len(first["held"]) == 3  # two blocks and the root
    assert second["held"][0] == second["held"][1]


def test_rank_that_builds_another_model_reports_it(placed):
    messages = [json.loads((placed / f"{rank}.{OTHER}").read_text()) for rank in (0, 1)]
    assert messages[0] == ""
    assert "rank 0" in messages[1] and "lm_head" in messages[1]
