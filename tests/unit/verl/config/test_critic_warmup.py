"""A run whose steps all train only the critic is refused, and the plan subtracts these steps."""

import pytest

from verl.config.load import load_config
from verl.config.plan import PlanFacts, PPOPlan, make_plan

WARMUP = "trainer.critic_warmup"
BASE = (
    "algorithm.adv_estimator=gae",
    "data.train_batch_size=8",
    "trainer.total_epochs=3",
    "actor_rollout_ref.actor.ppo_mini_batches=2",
    "actor_rollout_ref.actor.ppo_epochs=3",
)


def plan(*overrides: str, **facts) -> PPOPlan:
    counted = make_plan(load_config("ppo_trainer", [*BASE, *overrides]), PlanFacts(**facts))
    assert isinstance(counted, PPOPlan)
    return counted


@pytest.mark.parametrize(("warmup", "updates"), [(0, 10), (4, 6), (9, 1)])
def test_plan_counts_the_updates_after_the_warmup(warmup, updates):
    counted = plan("trainer.total_training_steps=10", f"{WARMUP}={warmup}")
    assert (counted.training_steps, counted.total_optimizer_steps) == (10, updates * 2 * 3)
    assert counted.find_problems() == []


@pytest.mark.parametrize("warmup", [10, 11])
def test_run_without_an_update_is_refused(warmup):
    (problem,) = plan("trainer.total_training_steps=10", f"{WARMUP}={warmup}").find_problems()
    assert (problem.key_path, problem.code) == (WARMUP, "conflicting_keys")


def test_number_of_steps_is_checked_as_soon_as_it_is_known():
    """35 tasks in batches of 8 are 4 steps per epoch, so 12 steps."""
    assert plan(f"{WARMUP}=12").find_problems() == []
    assert plan(f"{WARMUP}=11", train_tasks=35).find_problems() == []
    assert len(plan(f"{WARMUP}=12", train_tasks=35).find_problems()) == 1


def test_evaluation_needs_no_update():
    overrides = ("trainer.total_training_steps=10", f"{WARMUP}=10")
    assert plan("trainer.val_only=true", *overrides).find_problems() == []
    assert plan(*overrides, audit_text="4 turns").find_problems() == []
