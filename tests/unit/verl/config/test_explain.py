"""Batch sizes and epochs mean what they mean in published jobs, or the plan explains them."""

import pytest

from tests.helpers.refusals import has_problem, missing_parts
from verl.config import plan_notes
from verl.config.explain import PLAN_LABELS_BY_KEYS, explain_key
from verl.config.load import load_config
from verl.config.plan import PlanFacts, make_plan
from verl.config.plan_notes import iterate_plan_notes
from verl.config.plugins import collect_all_keys
from verl.config.schema import PPOConfig
from verl.config.settings import ConfigError
from verl.trainer import cli

ACTOR = "actor_rollout_ref.actor"
PLACEHOLDER = "data.train_files=/root/data/verl-agent/text/train.parquet"
FACTS = PlanFacts(cores=2, train_tasks=2000)


def config(*overrides: str) -> PPOConfig:
    return load_config("ppo_trainer", overrides)


@pytest.mark.parametrize(
    ("estimator", "group_size"), [("grpo", 8), ("gigpo", 8), ("gae", 1), ("reinforce_plus_plus", 1)]
)
def test_unset_group_size_is_one_unless_trajectories_are_compared(estimator, group_size):
    assert config(f"algorithm.adv_estimator={estimator}").env.rollout.n == group_size
    assert config(f"algorithm.adv_estimator={estimator}", "env.rollout.n=3").env.rollout.n == 3
    filtered = config(f"algorithm.adv_estimator={estimator}", "algorithm.filter_groups.enable=true")
    assert filtered.env.rollout.n == 8


@pytest.mark.parametrize(
    ("device", "ranks", "count"), [("auto", 8, 1), ("auto", 1, 0), ("cpu", 8, 0)]
)
def test_ranks_without_gpu_are_named(monkeypatch, device, ranks, count):
    monkeypatch.setattr(plan_notes, "guess_device", lambda _: "cpu")
    cfg = config(f"trainer.device={device}", f"trainer.n_gpus_per_node={ranks}")
    assert len([note for note in iterate_plan_notes(cfg) if f"--on {ranks}xH100" in note]) == count


def test_placeholder_epoch_is_one_step_and_plan_explains_it():
    plan = make_plan(config("trainer.total_epochs=150"), FACTS)
    assert plan.training_steps == 150 * 125
    assert "trainer.total_training_steps=150" in plan.format_text()
    plan = make_plan(config("trainer.total_epochs=150", PLACEHOLDER), FACTS)
    notes = [text for label, text in plan.iterate_labelled_lines() if label == "note"]
    assert plan.training_steps == 150 and any("data.train_files" in note for note in notes)
    notes = list(iterate_plan_notes(config("trainer.total_training_steps=9")))
    assert not [note for note in notes if "epoch" in note]


def test_plan_says_when_a_mini_batch_counts_tasks_instead_of_rows():
    text = make_plan(config("env.max_steps=50"), FACTS).format_text()
    assert "note" in text and "ppo_mini_batch_size=256 " in text
    # 6,400 rows in steps of 256 are 25 steps; 16 is the largest divisor of 128 trajectories below
    # 25.
    fix = f"{ACTOR}.ppo_mini_batches=16"
    assert not missing_parts(text, 25, "6,400 rows", fix)
    for overrides in ([fix], ["env.max_steps=1"]):
        assert fix not in make_plan(config(*overrides), FACTS).format_text()


def test_key_is_explained_in_tasks_trajectories_rows_and_tokens():
    cfg = config(f"{ACTOR}.ppo_mini_batch_size=4", "env.history=append", "env.max_turn_tokens=64")
    text = explain_key(cfg, f"{ACTOR}.ppo_mini_batch_size")
    assert text.startswith(f"{ACTOR}.ppo_mini_batch_size=4\n")
    assert "4 tasks = 32 trajectories, 32 rows" in text
    assert "= 128 trajectories" in explain_key(cfg, "data.train_batch_size")
    assert "2,560 tokens" in explain_key(cfg, "data.max_prompt_length")
    assert "8 rows = 20,480 tokens" in explain_key(cfg, f"{ACTOR}.ppo_micro_batch_size_per_gpu")
    assert "refused: " in explain_key(cfg, "data.image_key")
    assert "no effect: " in explain_key(cfg, "actor_rollout_ref.model.use_liger")
    assert "=" not in explain_key(cfg, "env.frozen_lake.size").splitlines()[0]


@pytest.mark.parametrize("path", [path for paths in PLAN_LABELS_BY_KEYS for path in paths])
def test_every_explained_key_exists_and_has_plan_lines(path):
    assert path in collect_all_keys(PPOConfig)
    assert len(explain_key(config(), path).splitlines()) > 3


def test_unknown_key_and_section_are_not_explained():
    with pytest.raises(
        ConfigError, check=has_problem("unknown_key", "--explain", "env.rollot.n", "env.rollout")
    ):
        explain_key(config(), "env.rollot.n")
    with pytest.raises(ConfigError, check=has_problem("unknown_key", "--explain", "env")):
        explain_key(config(), "env")


def test_explain_is_a_command_line_option():
    overrides = ["--explain", "env.rollout.n", "algorithm.adv_estimator=gae"]
    assert "default: 1" in (cli.parse(overrides).text or "")
    with pytest.raises(ConfigError, check=has_problem("unknown_key", "env.rollot.n")):
        cli.parse([*overrides, "env.rollot.n=3"])


def test_plan_names_the_checkpoint_from_which_the_run_continues(tmp_path):
    def describe_run_directory(*overrides):
        cfg = config(f"trainer.default_local_dir={tmp_path}", *overrides)
        return dict(make_plan(cfg, FACTS).iterate_labelled_lines())["run directory"]

    assert describe_run_directory() == str(tmp_path)
    checkpoint = tmp_path / "checkpoints" / "global_step_3"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    text = f"{tmp_path}; the run continues from {checkpoint}"
    assert describe_run_directory("trainer.total_training_steps=4") == text
    finished = describe_run_directory("trainer.total_training_steps=3")
    assert finished == f"{text}: nothing is left to train"
    assert describe_run_directory("trainer.resume_mode=disable") == str(tmp_path)
    assert describe_run_directory("trainer.val_only=true") == str(tmp_path)
