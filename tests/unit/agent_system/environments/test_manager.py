"""Tests of the task schedule and of environments that step in lock-step."""

from dataclasses import replace
from typing import Any

import pytest

from agent_system.environments.env import Observation
from agent_system.environments.env_registry import get_package, read_env_settings
from agent_system.environments.manager import (
    EnvironmentManagerBase,
    load_tasks,
    make_envs,
)
from agent_system.environments.tasks import (
    GroupMismatch,
    assert_same_start_states,
    check_disjoint_splits,
)
from tests.helpers.refusals import has_problem, mentions
from verl.config.schema import PPOConfig
from verl.config.schema.env import DataConfig, EnvConfig
from verl.config.settings.errors import UserError
from verl.utils.statistics import bootstrap_interval


def make_config(shuffle=True, **env: Any) -> PPOConfig:
    """Return a config with eight positions on a line and groups of four."""
    small = {"seed": 3, "max_steps": 6, "rollout": {"n": 4}, "val_tasks": 10, "kwargs": {"size": 8}}
    section = EnvConfig.model_validate({"env_name": "number_line", **small, **env})
    return PPOConfig(env=section, data=DataConfig(shuffle=shuffle))


def read_columns(batch, *keys):
    return [
        tuple(row)
        for row in zip(*(batch.non_tensor_batch[key].tolist() for key in keys), strict=True)
    ]


def test_tasks_keep_their_order_without_shuffling():
    train, _ = make_envs(make_config(shuffle=False))
    ids = [task["task_id"] for task in train.task_list]
    drawn_ids = [
        row[0]
        for step in (1, 2, 3)
        for row in read_columns(train.gen_batch(step, len(ids) // 2), "task_id")[::4]
    ]
    assert drawn_ids == (ids * 2)[: len(drawn_ids)]


def test_draws_continue_in_the_given_order_without_shuffling():
    train, _ = make_envs(make_config(shuffle=False))
    ids = [task["task_id"] for task in train.task_list]
    drawn_ids = [
        row[0]
        for batch_in_step in (0, 1)
        for row in read_columns(train.gen_batch(1, len(ids) // 2, batch_in_step), "task_id")[::4]
    ]
    assert drawn_ids == ids[: len(drawn_ids)]


def test_members_of_a_group_share_task_and_seed():
    train, _ = make_envs(make_config())
    batch = train.gen_batch(step=1, batch_size=3)
    assert len(batch) == 12
    assert batch.non_tensor_batch["member"].tolist() == [0, 1, 2, 3] * 3
    groups = {}
    for uid, task_id, seed in read_columns(batch, "uid", "task_id", "env_seed"):
        groups.setdefault(uid, set()).add((task_id, seed))
    assert len(groups) == 3 and all(len(members) == 1 for members in groups.values())


def test_same_config_and_seed_select_the_same_tasks():
    first, again, other = (
        make_envs(make_config(seed=seed))[0].gen_batch(5, 8) for seed in (3, 3, 4)
    )
    keys = ("task_id", "env_seed", "uid")
    assert read_columns(first, *keys) == read_columns(again, *keys)
    assert read_columns(first, "task_id") != read_columns(other, "task_id")


def test_batches_do_not_depend_on_earlier_batches():
    train, _ = make_envs(make_config())
    expected = read_columns(train.gen_batch(9, 4), "task_id", "env_seed")
    train.gen_batch(2, 4)
    assert read_columns(train.gen_batch(9, 4), "task_id", "env_seed") == expected


def test_each_epoch_visits_every_task_once_in_a_new_order():
    train, _ = make_envs(make_config())
    count = len(train.task_list)
    assert count % 4 == 0
    order = [
        read_columns(train.gen_batch(step, 4), "task_id")[::4]
        for step in range(1, 1 + 2 * count // 4)
    ]
    order = [task for batch in order for task in batch]
    assert len(set(order[:count])) == count and set(order[count:]) == set(order[:count])
    assert order[:count] != order[count:]


def test_second_draw_of_a_step_has_other_tasks_and_groups():
    train, _ = make_envs(make_config())
    draws = [train.gen_batch(1, 4, batch_in_step=batch_in_step) for batch_in_step in (0, 1)]
    assert read_columns(draws[0], "task_id", "uid") != read_columns(draws[1], "task_id", "uid")
    assert not set(read_columns(draws[0], "uid")) & set(read_columns(draws[1], "uid"))


def test_validation_set_is_frozen_and_holds_each_task_once():
    val_managers = [make_envs(make_config(seed=seed))[1] for seed in (0, 1)]
    batch = val_managers[0].panel_batch()
    assert len(batch) == 10 == len(set(batch.non_tensor_batch["task_id"]))
    assert val_managers[0].panel_hash == val_managers[1].panel_hash
    assert make_envs(make_config(val_tasks=9))[1].panel_hash != val_managers[0].panel_hash


def test_validation_set_hash_is_stable_between_versions():
    assert make_envs(make_config())[1].panel_hash == "be709fdc7fb4cf42"


def test_train_and_validation_tasks_are_disjoint():
    train, val = make_envs(make_config())
    assert not {t["task_id"] for t in train.task_list} & {t["task_id"] for t in val.task_list}
    with pytest.raises(UserError, check=has_problem("wrong_cell", "", 1, "'a'")):
        check_disjoint_splits(
            [{"task_id": "a", "data_source": "s"}], [{"task_id": "a", "data_source": "s"}]
        )


@pytest.mark.parametrize(
    ("tasks", "content"),
    [
        ([{"task_id": "a", "data_source": "s"}] * 2, "1 of 2"),
        ([{"task_id": 4, "data_source": "s"}], "task_id"),
        ([{"task_id": "a"}], "data_source"),
        ([{"task_id": "a", "data_source": "s"}, "b"], "data_source"),
        ([{"task_id": "a", "data_source": "s", "object": object()}], "JSON"),
        ({"task_id": "a", "data_source": "s"}, "data_source"),
        (None, "None"),
        ("raise", "tasks"),
    ],
)
def test_invalid_tasks_are_refused(tasks, content):
    def make_tasks(settings, split):
        return {}["missing"] if tasks == "raise" else tasks

    package = replace(get_package("number_line"), tasks=make_tasks)
    with pytest.raises(UserError, check=has_problem("failed_call", "", content)):
        load_tasks("number_line", package, package.read_settings(), "train")


def test_train_tasks_limits_the_task_count():
    train, _ = make_envs(make_config(train_tasks=5))
    assert len(train.task_list) == 5


def test_section_inherits_unset_keys_from_env():
    section = {"number_line": {"size": 1, "max_steps": None}, "kwargs": {"size": 2}}
    choice = {"env_name": "number_line", "max_steps": 7, "seed": 1}
    settings: Any = read_env_settings(EnvConfig.model_validate(choice | section))
    assert (settings.size, settings.max_steps, settings.seed) == (2, 7, 1)


def test_group_with_different_start_states_is_refused():
    assert_same_start_states(["a", "a", "b"], [("x", "x"), ("x", "x"), ("y", "y")])
    assert_same_start_states(["a", "a"], [None, ("x", "x")])
    with pytest.raises(GroupMismatch, check=mentions("group a")):
        assert_same_start_states(["a", "a"], [("x", "x"), ("y", "y")])
    with pytest.raises(GroupMismatch):
        assert_same_start_states(["a", "a"], [("x", "1"), ("x", "2")])
    assert Observation("x").state == "x" and Observation("x", anchor="1").state == "1"


def choose_move(anchor):
    position, target = map(int, anchor.split("->"))
    side = "right" if target > position else "left"
    return f"<action>{'jump ' if abs(target - position) >= 3 else ''}{side}</action>"


@pytest.mark.parametrize("placement", ["inline", "process"])
def test_scripted_policy_succeeds_in_lock_step(placement):
    manager = EnvironmentManagerBase(make_config(kwargs={"size": 8, "placement": placement}), "val")
    batch = manager.panel_batch()
    observations, infos = manager.reset(batch)
    assert len(observations["text"]) == 10 and "admissible_actions" in infos[0]
    total: Any = 0.0
    done: Any = [False]
    for _ in range(6):
        observations, rewards, done, infos = manager.step(
            [choose_move(a) for a in observations["anchor"]]
        )
        total += rewards
    assert done.all() and total.tolist() == [1.0] * 10  # finished rows get no further reward
    outcome = manager.success_evaluator(infos, batch.non_tensor_batch["data_source"])
    assert outcome["success_rate"].mean() == 1.0 and outcome["number_line_success_rate"].shape == (
        10,
    )
    manager.close()


def test_malformed_text_is_invalid_and_a_wrong_count_is_an_error():
    manager = EnvironmentManagerBase(make_config(), "train")
    with pytest.raises(RuntimeError, check=mentions("step", "reset")):
        manager.step(["left"])
    manager.reset(manager.gen_batch(1, 1))
    _, rewards, _, infos = manager.step(["no tags here"] * 4)
    assert not any(info["is_action_valid"] for info in infos) and rewards.tolist() == [0.0] * 4
    with pytest.raises(ValueError, check=mentions(1, 4)):
        manager.step(["left"])
    manager.close()


def test_bootstrap_interval_bounds_the_mean():
    low, high = bootstrap_interval([0, 1] * 64)
    assert 0.40 < low < 0.43 and 0.57 < high < 0.60  # normal approximation: 0.5 +- 1.96 * 0.0442
    assert bootstrap_interval([1, 1, 1]) == (1.0, 1.0)
    assert bootstrap_interval([0, 1, 1]) == bootstrap_interval([0, 1, 1])
    assert all(bound != bound for bound in bootstrap_interval([]))
