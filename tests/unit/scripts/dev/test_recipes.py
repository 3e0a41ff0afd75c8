"""Tests that the recipes fit their devices, and of the estimated seconds of a step."""

import pytest

from scripts.dev.recipes import (
    ESTIMATORS,
    H100,
    MODELS,
    PARTS,
    RECIPES,
    estimate_part_seconds,
    estimate_step_seconds,
    format_tables,
    make_memory_facts,
)
from tests.helpers.jobs import ROOT
from verl.config.plan import make_plan
from verl.trainer.launch.extensions import load_config


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("estimator", [name for names in ESTIMATORS for name in names])
def test_recipe_has_the_published_settings_and_fits(name, estimator):
    cfg = load_config(name, [f"algorithm.adv_estimator={estimator}"])
    assert make_plan(cfg, make_memory_facts(cfg, RECIPES[name])).find_problems() == []
    assert (cfg.data.train_batch_size, cfg.env.rollout.n) == (16, 8)
    assert cfg.trainer.total_training_steps == 150
    actor = cfg.actor_rollout_ref.actor
    assert actor.use_kl_loss and actor.kl_loss_coef == 0.01
    assert actor.optim.lr == (1e-5 if cfg.actor_rollout_ref.model.lora_rank else 1e-6)


def test_recipe_that_does_not_fit_has_problems():
    cfg = load_config("alfworld_qwen2.5_7b_8gpu", ["trainer.n_gpus_per_node=1"])
    assert make_plan(cfg, make_memory_facts(cfg, H100)).find_problems()


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", 494_032_768),
        ("Qwen/Qwen2.5-1.5B-Instruct", 1_543_714_304),
        ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512),
    ],
)
def test_models_have_the_published_number_of_parameters(name, parameters):
    assert MODELS[name].num_parameters == parameters


def test_seconds_of_one_recipe_by_hand():
    cfg = load_config("alfworld_qwen2.5_1.5b_8gpu", ["algorithm.adv_estimator=rlvcr"])
    seconds = estimate_part_seconds(cfg, H100)
    weights = 1_543_714_304
    row = 500 + 25 * 120
    operations = 8 * 0.4 * 989e12
    assert seconds["reference"] == pytest.approx(2 * weights * 128 * row / operations)
    assert seconds["update"] == pytest.approx(4 * seconds["reference"])
    branches = 3 * 128 * 25 * 60
    assert seconds["score"] == pytest.approx(2 * weights * (128 * row + branches) / operations)
    # 16 trajectories run on each engine at once: weights, and half a row of keys and values of
    # each.
    cache = 2 * 28 * 256 * 2
    step = (2 * weights + 16 * row / 2 * cache) / (0.6 * 3350e9) + 0.005
    assert seconds["rollout"] == pytest.approx(25 * 60 * step + 25 * 0.05)
    # Each engine generates 1,200 thoughts, 64 at once.
    step = (2 * weights + 64 * row / 2 * cache) / (0.6 * 3350e9) + 0.005
    assert seconds["alternatives"] == pytest.approx(1200 / 64 * 40 * step)
    on_device = (4 + 7 * 2) * weights / (0.6 * 3350e9)
    assert seconds["weight sync"] == pytest.approx(4 * weights / 25e9 + on_device)
    single_gpu = load_config("alfworld_qwen2.5_1.5b_80gb")
    assert estimate_part_seconds(single_gpu, H100)["weight sync"] == pytest.approx(on_device)
    cfg.actor_rollout_ref.rollout.weight_transfer = "store"
    stored = estimate_part_seconds(cfg, H100)["weight sync"]
    assert stored == pytest.approx((4 + 2 + 2) * weights / 4e9)


def test_rollout_and_training_overlap_on_separate_gpus():
    parts = dict.fromkeys(PARTS, 0.0) | {
        "rollout": 20.0,
        "score": 5.0,
        "update": 9.0,
        "weight sync": 2.0,
    }
    apart = load_config("alfworld_qwen2.5_7b_2nodes_apart")
    shared = load_config("alfworld_qwen2.5_7b_2nodes")
    assert (estimate_step_seconds(apart, parts), estimate_step_seconds(shared, parts)) == (
        22.0,
        36.0,
    )
    assert estimate_step_seconds(apart, parts | {"update": 30.0}) == 37.0
    # Branches are scored when both halves are done.
    thinking = parts | {"alternatives": 10.0}
    assert (estimate_step_seconds(apart, thinking), estimate_step_seconds(shared, thinking)) == (
        37.0,
        46.0,
    )
    apart.trainer.rollout_overlap = "off"
    assert estimate_step_seconds(apart, parts) == 36.0


def test_only_thinking_advantages_need_alternatives():
    cfg = load_config("alfworld_qwen2.5_1.5b_8gpu", ["algorithm.adv_estimator=gigpo"])
    seconds = estimate_part_seconds(cfg, H100)
    assert seconds["alternatives"] == 0 and seconds["score"] == seconds["reference"]


def test_docs_page_shows_the_printed_tables():
    assert "\n".join(format_tables()) in (ROOT / "docs" / "cluster.md").read_text()
