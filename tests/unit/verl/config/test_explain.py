"""Amounts mean what published jobs mean by them, or the plan says so beside the number."""

import pytest

from tests.helpers.refusals import mentions
from verl.config import plan_notes
from verl.config.explain import LINES_OF_KEYS, explain_key
from verl.config.load import load_config
from verl.config.plan import make_plan
from verl.config.plan_notes import iterate_plan_notes
from verl.config.plugins import schema_keys
from verl.config.schema import PPOConfig
from verl.config.settings import ConfigError
from verl.trainer import cli

ACTOR = "actor_rollout_ref.actor"
PLACEHOLDER = "data.train_files=/root/data/verl-agent/text/train.parquet"
FACTS = {"cores": 2, "train_tasks": 2000}


def config(*words: str) -> PPOConfig:
    return load_config("ppo_trainer", words)


@pytest.mark.parametrize(
    ("estimator", "plays"), [("grpo", 8), ("gigpo", 8), ("gae", 1), ("reinforce_plus_plus", 1)]
)
def test_an_unset_group_size_is_one_unless_plays_are_compared(estimator, plays):
    assert config(f"algorithm.adv_estimator={estimator}").env.rollout.n == plays
    assert config(f"algorithm.adv_estimator={estimator}", "env.rollout.n=3").env.rollout.n == 3
    filtered = config(f"algorithm.adv_estimator={estimator}", "algorithm.filter_groups.enable=true")
    assert filtered.env.rollout.n == 8


@pytest.mark.parametrize(
    ("device", "ranks", "count"), [("auto", 8, 1), ("auto", 1, 0), ("cpu", 8, 0)]
)
def test_ranks_that_get_no_gpu_are_named(monkeypatch, device, ranks, count):
    monkeypatch.setattr(plan_notes, "guess_device", lambda _: "cpu")
    cfg = config(f"trainer.device={device}", f"trainer.n_gpus_per_node={ranks}")
    assert len([note for note in iterate_plan_notes(cfg) if f"--on {ranks}xH100" in note]) == count


def test_an_epoch_of_a_placeholder_is_one_iteration_and_the_plan_says_what_others_are():
    plan = make_plan(config("trainer.total_epochs=150"), FACTS)
    assert plan.training_steps == 150 * 125
    assert "trainer.total_training_steps=150" in plan.format_text()
    plan = make_plan(config("trainer.total_epochs=150", PLACEHOLDER), FACTS)
    assert plan.training_steps == 150 and "an epoch is one training step" in plan.format_text()
    said = list(iterate_plan_notes(config("trainer.total_training_steps=9")))
    assert not [note for note in said if "epoch" in note]


def test_the_plan_says_where_a_mini_batch_counts_tasks_and_not_rows():
    said = make_plan(config("env.max_steps=50"), FACTS).format_text()
    assert "ppo_mini_batch_size=256 counts tasks" in said
    # 6,400 rows in steps of 256 are 25, and 16 is what divides 128 trajectories below that.
    assert f"25 optimizer steps of 6,400 rows: {ACTOR}.ppo_mini_batches=16" in said
    for words in ([f"{ACTOR}.ppo_mini_batches=16"], ["env.max_steps=1"]):
        assert "counts tasks" not in make_plan(config(*words), FACTS).format_text()


def test_a_key_is_explained_in_tasks_trajectories_rows_and_tokens():
    cfg = config(f"{ACTOR}.ppo_mini_batch_size=4", "env.history=append", "env.max_turn_tokens=64")
    text = explain_key(cfg, f"{ACTOR}.ppo_mini_batch_size")
    assert text.startswith(f"{ACTOR}.ppo_mini_batch_size=4\n")
    assert "4 tasks = 32 trajectories, 32 rows at most" in text
    assert "= 128 trajectories" in explain_key(cfg, "data.train_batch_size")
    assert "2,560 tokens each at most" in explain_key(cfg, "data.max_prompt_length")
    assert "8 rows = 20,480 tokens" in explain_key(cfg, f"{ACTOR}.ppo_micro_batch_size_per_gpu")
    assert "refused: " in explain_key(cfg, "data.image_key")
    assert "no effect: " in explain_key(cfg, "actor_rollout_ref.model.use_liger")
    assert "no value, because this configuration lacks" in explain_key(cfg, "env.frozen_lake.size")


@pytest.mark.parametrize("path", [path for paths in LINES_OF_KEYS for path in paths])
def test_every_explained_amount_is_a_key_with_lines_of_the_plan(path):
    assert path in schema_keys(PPOConfig)
    assert len(explain_key(config(), path).splitlines()) > 3


def test_what_is_no_key_is_not_explained():
    with pytest.raises(ConfigError, check=mentions("env.rollot.n", "env.rollout")):
        explain_key(config(), "env.rollot.n")
    with pytest.raises(ConfigError, check=mentions("--explain env")):
        explain_key(config(), "env")


def test_explain_is_a_word_of_the_command_line():
    words = ["--explain", "env.rollout.n", "algorithm.adv_estimator=gae"]
    assert "default: 1" in (cli.parse(words).text or "")
    with pytest.raises(ConfigError, check=mentions("env.rollot.n")):
        cli.parse([*words, "env.rollot.n=3"])
