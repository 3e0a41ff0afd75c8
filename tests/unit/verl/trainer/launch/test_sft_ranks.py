"""Supervised training on two gloo ranks equals training on one, and packed rows equal separate
rows."""

import errno
import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers.ranks import run_two_ranks
from tests.helpers.refusals import mentions
from tests.helpers.tiny_model import make_tiny_policy
from verl.config.load import load_config
from verl.config.schema import SFTConfig
from verl.config.schema.model import OptimConfig
from verl.config.settings import ConfigError
from verl.config.validate import find_problems
from verl.models.loader import load_causal_lm
from verl.models.policy import PolicyModel
from verl.trainer.launch import sft_ranks
from verl.trainer.launch.sft import run_sft
from verl.trainer.launch.sft_ranks import ADAPTER_FOLDER, SFTJob, count_local_ranks
from verl.trainer.sft.rows import SFTRow
from verl.trainer.sft.trainer import LossSumsByName, SFTTrainer
from verl.utils.checkpoint import CheckpointError, CheckpointManager, verify_checkpoint
from verl.workers import engine_state
from verl.workers.collectives import init_distributed
from verl.workers.engine import TrainEngine

LENGTHS = (30, 7, 12, 25, 9, 40, 5, 16, 11, 33)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"), hidden=32, layers=1, std=0.2)


def row_of(length: int, seed: int) -> SFTRow:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 40, (length,), generator=g).tolist()
    return SFTRow(tuple(ids), tuple([0.0] + [1.0, 0.5] * length)[:length])


# ---- packing ------------------------------------------------------------------------------------


def train_and_get_gradient(
    policy: Path, rows: list[SFTRow], max_tokens: int
) -> tuple[dict, torch.Tensor]:
    """Return the metrics of a step on ``rows``, and the embedding gradient before the update."""
    optim = OptimConfig(lr=0.0, total_training_steps=1)
    engine = TrainEngine(PolicyModel(load_causal_lm(policy)), device="cpu", optim=optim)
    trainer = SFTTrainer(engine, rows, [list(range(len(rows)))], max_tokens=max_tokens)
    gradients: list[torch.Tensor] = []
    step = engine.step

    def step_and_record():
        lm: Any = engine.module.lm
        gradient = lm.get_input_embeddings().weight.grad
        gradients.append(gradient.full_tensor().clone())
        return step()

    engine.step = step_and_record
    return trainer.train_step(range(len(rows))), gradients[0]


def test_packed_rows_have_the_loss_of_separate_rows(policy):
    rows = [row_of(length, seed) for seed, length in enumerate(LENGTHS)]
    packed, gradient = train_and_get_gradient(policy, rows, max_tokens=1000)
    # One pass for every row.
    separate, expected = train_and_get_gradient(policy, rows, max_tokens=1)
    for name in ("train/loss", "train/agent_loss", "train/grad_norm"):
        assert packed[name] == pytest.approx(separate[name], rel=1e-5)
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-4)


def test_packed_rows_do_not_attend_to_each_other(policy):
    engine = TrainEngine(PolicyModel(load_causal_lm(policy)), device="cpu")
    trainer = SFTTrainer(engine, [], [])
    row = row_of(12, 1)
    losses = []
    for neighbour in (row_of(20, 2), row_of(20, 3)):
        both, single = LossSumsByName(), LossSumsByName()
        with torch.no_grad():
            trainer._sum_losses([neighbour, row], both)
            trainer._sum_losses([neighbour], single)
        losses.append(both["loss"] - single["loss"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


# ---- several devices ----------------------------------------------------------------------------


def run_supervised(directory: Path, policy: Path, ranks: int, *more: str) -> Path:
    """Train on rows in ``directory`` with ``ranks`` ranks, and return the saved policy."""
    rows = [row_of(length, seed) for seed, length in enumerate(LENGTHS)]
    lines = [
        json.dumps({"input_ids": row.input_ids, "loss_weights": row.loss_weights}) for row in rows
    ]
    (directory / "rows.jsonl").write_text("\n".join(lines) + "\n")
    overrides = [
        f"model.path={policy}",
        f"model.save_path={directory / f'made-{ranks}'}",
        f"data.train_files=[{directory / 'rows.jsonl'}]",
        f"data.val_files=[{directory / 'rows.jsonl'}]",
        # A batch has two to five rows. The last batch of an epoch may have fewer rows than ranks.
        "data.tokens_per_batch=60",
        "data.max_length=64",
        "data.max_token_len_per_gpu=64",
        "optim.lr=0.01",
        "optim.eps=0.01",
        f"trainer.n_gpus_per_node={ranks}",
        f"trainer.default_local_dir={directory / f'run-{ranks}'}",
        "trainer.total_epochs=2",
        "trainer.device=cpu",
        "trainer.num_threads=1",
        "trainer.save_freq=2",
    ]
    return run_sft(load_config("sft_trainer", [*overrides, *more], SFTConfig))


def read_history(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.timeout(600)  # three trainings, one of them in two new processes
def test_two_ranks_train_the_policy_of_one_rank(policy, tmp_path):
    policies = {ranks: run_supervised(tmp_path, policy, ranks) for ranks in (1, 2)}
    one_rank, two_ranks = (read_history(tmp_path / f"run-{ranks}") for ranks in (1, 2))
    assert [line["step"] for line in two_ranks] == [line["step"] for line in one_rank]
    for one, two in zip(one_rank, two_ranks, strict=True):
        for name in ("train/loss", "train/agent_loss", "train/grad_norm", "val/loss"):
            assert (name in one) == (name in two)
            if name in one:
                assert one[name] == pytest.approx(two[name], rel=1e-3), (one["step"], name)
    assert two_ranks[-1]["val/loss"] < two_ranks[0]["val/loss"]
    one, two = (AutoModelForCausalLM.from_pretrained(policies[ranks]) for ranks in (1, 2))
    start = AutoModelForCausalLM.from_pretrained(policy)
    for (name, mine), other, before in zip(
        one.named_parameters(), two.parameters(), start.parameters(), strict=True
    ):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-3, msg=name)
        assert not torch.equal(mine, before), name
    # Both ranks wrote one checkpoint. It verifies, and one rank can resume from it.
    newest = CheckpointManager(tmp_path / "run-2" / "checkpoints").find_latest_valid()
    assert newest is not None
    assert {"rng_rank0.safetensors", "rng_rank1.safetensors"} <= {f.name for f in newest.iterdir()}
    (tmp_path / "more").mkdir()
    overrides = ("trainer.total_epochs=3", "trainer.resume_mode=resume_path")
    run_supervised(tmp_path / "more", policy, 1, *overrides, f"trainer.resume_from_path={newest}")
    assert read_history(tmp_path / "more" / "run-1")[0]["step"] == one_rank[-1]["step"] + 1


def fail_second_save_on_one_rank(number: int, policy: Path, root: Path) -> None:
    """Save twice. The second time the disk of rank 1 is full."""
    init_distributed("cpu")
    engine = TrainEngine(PolicyModel(load_causal_lm(policy)), device="cpu", optim=OptimConfig())
    checkpoints = CheckpointManager(root, max_to_keep=1)
    trainer = SFTTrainer(engine, [row_of(9, 0)], [[0]], save_freq=1, checkpoints=checkpoints)
    trainer.save()
    trainer.step = 1
    if number == 1:
        engine_state.begin_writing_shards = raise_disk_full
    with pytest.raises(CheckpointError, check=mentions("rank 1", "No space left")):
        trainer.save()


def raise_disk_full(*_: object) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.timeout(300)
def test_failed_write_of_one_rank_publishes_no_checkpoint(policy, tmp_path):
    run_two_ranks(fail_second_save_on_one_rank, policy, tmp_path)
    (checkpoint,) = tmp_path.iterdir()  # neither step 1 nor a partial directory
    assert checkpoint.name == "global_step_0"
    verify_checkpoint(checkpoint)


def test_interrupted_run_kills_its_ranks(monkeypatch):
    """The run must not wait for a stopped rank (SIGSTOP), which does not react to SIGTERM."""
    children = []

    def start_sleeping(*_: object, **options: object) -> Any:
        assert options["join"] is False
        children.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        children[0].send_signal(signal.SIGSTOP)
        return SimpleNamespace(processes=children, join=raise_interrupt)

    def raise_interrupt() -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(sft_ranks, "spawn", start_sleeping)
    with pytest.raises(KeyboardInterrupt):
        sft_ranks.train_on_ranks(cast(SFTJob, None), num_ranks=2)
    assert children[0].wait(30) == -signal.SIGKILL


def test_several_machines_are_refused():
    with pytest.raises(ConfigError) as refused:
        load_config("sft_trainer", ["trainer.nnodes=2"], SFTConfig)
    (problem,) = refused.value.problems
    assert problem.startswith("trainer.nnodes=2")
    cfg = load_config("sft_trainer", ["trainer.n_gpus_per_node=2"], SFTConfig)
    assert not [p for p in find_problems(cfg) if "n_gpus_per_node" in p]


def test_cold_start_uses_the_available_gpus(monkeypatch):
    requested = {"auto": 3, "cpu": 3}
    for gpus, expected in [(0, requested), (1, {"auto": 1, "cpu": 3}), (8, requested)]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpus=gpus: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        for device, ranks in expected.items():
            overrides = ["trainer.n_gpus_per_node=3", f"trainer.device={device}"]
            assert count_local_ranks(load_config("sft_trainer", overrides, SFTConfig)) == ranks


def test_lora_trains_the_adapter_only_and_writes_merged_policy_and_adapter(policy, tmp_path):
    peft = pytest.importorskip("peft")
    lora = ("model.lora_rank=4", "model.lora_alpha=8", "model.target_modules=[q_proj,v_proj]")
    made = run_supervised(tmp_path, policy, 1, *lora, "trainer.total_epochs=1")
    history = read_history(tmp_path / "run-1")
    assert history[-1]["val/loss"] < history[0]["val/loss"]
    merged = AutoModelForCausalLM.from_pretrained(made)
    start = AutoModelForCausalLM.from_pretrained(policy)
    for (name, mine), before in zip(merged.named_parameters(), start.parameters(), strict=True):
        assert torch.equal(mine, before) != ("q_proj.w" in name or "v_proj.w" in name), name
    joined = peft.PeftModel.from_pretrained(start, made / ADAPTER_FOLDER).merge_and_unload()
    for (name, mine), other in zip(merged.named_parameters(), joined.parameters(), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-5, msg=name)
    # The run continues with the adapter of its checkpoint.
    run_supervised(tmp_path, policy, 1, *lora, "trainer.total_epochs=2", "model.overwrite=true")
    continued = read_history(tmp_path / "run-1")
    assert continued[len(history)]["step"] == history[-1]["step"] + 1
    assert continued[-1]["val/loss"] < history[-1]["val/loss"]


def test_lora_that_cannot_train_is_refused_before_the_run(policy, tmp_path):
    unknown = ("model.lora_rank=4", "model.target_modules=[q_porj]")
    with pytest.raises(ConfigError) as caught:
        run_supervised(tmp_path, policy, 1, *unknown)
    (problem,) = caught.value.problems
    assert (problem.key_path, problem.code) == ("model.target_modules", "unknown_name")
    new_policy = load_config("sft_trainer", ["model.lora_rank=4"], SFTConfig)
    (problem,) = find_problems(new_policy, check_files=False)
    assert (problem.key_path, problem.code) == ("model.lora_rank", "conflicting_keys")
