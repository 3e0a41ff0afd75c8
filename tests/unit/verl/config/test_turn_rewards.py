"""An estimator that compares turns is refused if scores of trajectories replace their rewards."""

import pytest

from tests.unit.verl.config.test_config_validate import GRADER, JUDGE, problems
from verl.config.problems import RegisteredNames
from verl.names import ESTIMATORS

COMPARES_TURNS = ("gigpo", "graphgpo", "hgpo")
REGISTERED = RegisteredNames(estimators={"mine": ["step_rewards"], "grpo": ["uid"]})
RULES = "reward_model.rule_weight=0.5"


def find_codes(estimator: str, *more: str, names: RegisteredNames | None = REGISTERED) -> list[str]:
    reported = problems(f"algorithm.adv_estimator={estimator}", *more, names=names)
    return [problem.code for problem in reported if problem.key_path == "algorithm.adv_estimator"]


@pytest.mark.parametrize("rewards", [[GRADER], JUDGE, [*JUDGE, GRADER, RULES]])
def test_replaced_rewards_of_turns_are_refused(rewards):
    assert find_codes("mine", *rewards) == ["conflicting_keys"]
    assert find_codes("grpo", *rewards) == []


@pytest.mark.parametrize(
    "rewards",
    [
        [*JUDGE, RULES],  # the rewards of turns are a part of the sum
        [GRADER, "data.train_files=[rows.jsonl]"],  # the environment grades rows of files
        # A reward manager of the user may compute the rewards of turns from the function.
        [GRADER, "reward_model.reward_manager=mine.py:Mine"],
        [],
    ],
)
def test_rewards_of_turns_that_count_are_allowed(rewards):
    assert find_codes("mine", *rewards) == []


def test_builtin_estimators_are_known_without_registries():
    refused = [name for name in ESTIMATORS if find_codes(name, GRADER, names=None)]
    assert sorted(refused) == sorted(COMPARES_TURNS)


def test_builtin_estimators_agree_with_the_registry():
    from verl.trainer.launch.extensions import collect_registered_names

    estimators = collect_registered_names().estimators or {}
    reading = [name for name, columns in estimators.items() if "step_rewards" in columns]
    assert sorted(reading) == sorted(COMPARES_TURNS)
