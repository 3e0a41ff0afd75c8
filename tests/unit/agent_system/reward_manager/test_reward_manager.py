"""Reward managers: the scores of every row sum to the outcome of its whole trajectory."""

import json
import math
import sys
import time
from fractions import Fraction
from typing import Any, Literal

import numpy as np
import pytest
import torch

from agent_system.multi_turn_rollout.rollout_loop import TrajectoryCollector
from agent_system.reward_manager.custom import load_function, load_import_path
from agent_system.reward_manager.managers import (
    REWARD_MANAGER_KEY,
    REWARD_MANAGERS,
    EpisodeRewardManager,
    StepRewardManager,
    compute_relative_lengths,
    group_rows_by_trajectory,
    limit_call_time,
    load_reward_manager,
    register,
)
from tests.helpers.number_line_world import make_config, make_world, walking_policy
from tests.helpers.refusals import has_problem, mentions, suggests
from tests.helpers.tiny_model import make_tiny_tokenizer
from verl.algos.advantages import compute_gdpo_outcome_advantage
from verl.config.settings.errors import UserError
from verl.protocol import DataProto, object_array
from verl.utils.limits import TimeLimitError


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


def make_rows(tokenizer, history: Literal["append", "window"]):
    """Return rows of two groups of two. The first action of every trajectory is not valid."""
    config, walking_script = make_config(history=history), walking_policy()

    def script(request, prompt):
        is_first_turn = "Nothing happens" not in prompt and "You chose: fly" not in prompt
        return "<action>fly</action>" if is_first_turn else walking_script(request, prompt)

    config.env.history_length = 20
    group, envs, _ = make_world(tokenizer, config, script)
    collector = TrajectoryCollector(config, tokenizer)
    try:
        return collector.multi_turn_loop(envs.gen_batch(1, 2), group, envs)
    finally:
        collector.close()


@pytest.mark.parametrize("history", ["append", "window"])
@pytest.mark.parametrize("manager", [EpisodeRewardManager, StepRewardManager])
def test_rows_sum_to_the_outcome_of_their_trajectory(tokenizer, history, manager):
    data = make_rows(tokenizer, history)
    scores = manager(invalid_action_penalty=0.25)(data)
    assert scores.shape == data.batch["responses"].shape
    assert scores.sum(-1).tolist() == [0.75] * len(data)
    assert (scores[~data.batch["response_mask"].bool()] == 0).all()


@pytest.mark.parametrize("manager", [EpisodeRewardManager, StepRewardManager])
def test_invalid_actions_reduce_the_outcome_of_all_rows(tokenizer, manager):
    data = make_rows(tokenizer, "window")
    first = data.non_tensor_batch["traj_uid"] == data.non_tensor_batch["traj_uid"][0]
    data = data[np.flatnonzero(first)]
    assert len(data) > 2
    valid = [[True] for _ in range(len(data))]
    valid[-1], valid[1] = [False], [False]
    data.non_tensor_batch["is_action_valid"] = object_array(valid)
    assert manager(invalid_action_penalty=0.25)(data).sum(-1).tolist() == [0.5] * len(data)


def test_step_rewards_are_on_the_last_token_of_their_turn(tokenizer):
    data = make_rows(tokenizer, "append")
    scores = StepRewardManager(invalid_action_penalty=0.25)(data)
    for row, steps in enumerate(data.non_tensor_batch["steps"]):
        by_step = {
            step: scores[row, int((data.batch["step_ids"][row] == step).nonzero()[-1])].item()
            for step in range(len(steps))
        }
        assert by_step[0] == -0.25 and by_step[len(steps) - 1] == 1.0
        assert scores[row].count_nonzero() == 2


@pytest.mark.parametrize("history", ["append", "window"])
def test_step_rewards_include_the_invalid_action_penalty(tokenizer, history):
    """The first action of every trajectory is not valid, and the last one succeeds."""
    data = make_rows(tokenizer, history)
    net = EpisodeRewardManager(invalid_action_penalty=0.25).step_rewards(data)
    for row, numbers in enumerate(data.non_tensor_batch["step_index"]):
        last = int(data.non_tensor_batch["episode_lengths"][row]) - 1
        expected = [{0: -0.25, last: 1.0}.get(number, 0.0) for number in numbers]
        assert net[row] == expected


@pytest.mark.parametrize("history", ["append", "window"])
def test_token_price_reduces_only_the_return_of_a_success(tokenizer, history):
    data = make_rows(tokenizer, history)
    tokens: dict[str, int] = {}
    for name, mask in zip(
        data.non_tensor_batch["traj_uid"], data.batch["response_mask"], strict=True
    ):
        tokens[name] = tokens.get(name, 0) + int(mask.sum())
    most = max(tokens.values())
    manager = EpisodeRewardManager(token_price=0.5, token_price_max=most * 2)
    expected = [1 - 0.5 * tokens[name] / (most * 2) for name in data.non_tensor_batch["traj_uid"]]
    assert manager(data).sum(-1).tolist() == pytest.approx(expected)
    # The price is capped at the maximum, and without success there is no price.
    short = EpisodeRewardManager(token_price=0.5, token_price_max=1)
    assert short.compute_outcomes(data) == [0.5] * len(data)
    # A price on a negative return would reward tokens.
    for outcome in (0.0, -2.0):
        data.non_tensor_batch["episode_rewards"][:] = outcome
        for priced in (manager, short, EpisodeRewardManager(relative_token_price=0.5)):
            assert priced.compute_outcomes(data) == [outcome] * len(data)


@pytest.mark.parametrize(
    ("kwargs", "key", "value"),
    [
        ({"token_price": 1.5}, "token_price", 1.5),
        ({"relative_token_price": 1.5}, "relative_token_price", 1.5),
        ({"token_price": 0.5}, "token_price_max", 0),
        ({"overlong_len": 9, "overlong_max": 8}, "overlong_len", 9),
        ({"overlong_len": -1}, "overlong_len", -1),
    ],
)
def test_impossible_price_is_refused(kwargs, key, value):
    refused = has_problem("out_of_range", f"reward_model.reward_kwargs.{key}", f"{key}={value}")
    with pytest.raises(UserError, check=refused):
        EpisodeRewardManager(**kwargs)


@pytest.mark.parametrize("history", ["append", "window"])
def test_overlong_penalty_is_proportional_to_the_excess(tokenizer, history):
    data = make_rows(tokenizer, history)
    names = data.non_tensor_batch["traj_uid"]
    per_row = data.batch["response_mask"].sum(-1).tolist()
    tokens = dict.fromkeys(names, 0)
    for name, count in zip(names, per_row, strict=True):
        tokens[name] += count
    first = tokens[names[0]]
    # too long by half of the buffer, by all of it, by more, and not at all
    for largest, expected in ((first + 2, 0.75), (first, 0.5), (4, 0.5), (first + 4, 1.0)):
        manager = EpisodeRewardManager(overlong_len=4, overlong_max=largest, overlong_penalty=0.5)
        assert manager.compute_outcomes(data)[0] == pytest.approx(expected)


def test_episode_score_is_on_the_last_sampled_token(tokenizer):
    data = make_rows(tokenizer, "append")
    scores = EpisodeRewardManager()(data)
    for row in range(len(data)):
        assert scores[row].nonzero().squeeze(-1).tolist() == [
            int(data.batch["response_mask"][row].nonzero()[-1])
        ]


def test_custom_function_gets_the_whole_trajectory(tokenizer, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def short_is_good(data_source, steps, extra_info):\n"
        "    assert [s['step'] for s in steps] == list(range(len(steps)))\n"
        "    return extra_info['episode_reward'] - 0.125 * len(steps)\n"
    )
    config = make_config()
    config.custom_reward_function.path, config.custom_reward_function.name = (
        str(file),
        "short_is_good",
    )
    data = make_rows(tokenizer, "window")
    expected = [1.0 - 0.125 * length for length in data.non_tensor_batch["episode_lengths"]]
    assert load_reward_manager(config)(data).sum(-1).tolist() == expected
    config.custom_reward_function.name = "short_is_goood"
    with pytest.raises(AttributeError, check=suggests("short_is_good")):
        load_reward_manager(config)
    config.reward_model.reward_manager, config.custom_reward_function.name = "step", "short_is_good"
    refused = has_problem("conflicting_keys", REWARD_MANAGER_KEY, "custom_reward_function.path")
    with pytest.raises(UserError, check=refused):
        load_reward_manager(config)


def test_invalid_settings_are_refused(tmp_path):
    config = make_config()
    config.reward_model.reward_manager = "epsiode"
    names = ("episode", "naive", "prime", "step")
    with pytest.raises(UserError, check=has_problem("unknown_name", REWARD_MANAGER_KEY, *names)):
        load_reward_manager(config)
    with pytest.raises(FileNotFoundError):
        load_function(str(tmp_path / "none.py"), "f")
    (tmp_path / "value.py").write_text("f = 3\n")
    with pytest.raises(TypeError, check=mentions("value.py")):
        load_function(str(tmp_path / "value.py"), "f")


def test_unknown_manager_is_refused_with_the_known_names():
    config = make_config()
    config.reward_model.reward_manager = "niave"
    with pytest.raises(ValueError, check=suggests("naive", "episode", "prime", "step")):
        load_reward_manager(config)


def test_managers_are_loaded_by_name_or_import_path(tmp_path, monkeypatch):
    monkeypatch.setattr("agent_system.reward_manager.managers.REWARD_MANAGERS", {})

    @register("mine", "also")
    class Mine(EpisodeRewardManager):
        """Manager that only this test registers."""

    monkeypatch.setitem(REWARD_MANAGERS, "mine", Mine)
    text = (
        "from agent_system.reward_manager import EpisodeRewardManager\n"
        "class Placed(EpisodeRewardManager): pass\n"
    )
    (tmp_path / "placed_rewards.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    config = make_config()
    for name, class_name in (
        ("mine", "Mine"),
        ("also", "Mine"),
        (f"{tmp_path}/placed_rewards.py:Placed", "Placed"),
        ("placed_rewards:Placed", "Placed"),
    ):
        config.reward_model.reward_manager = name
        assert type(load_reward_manager(config)).__name__ == class_name
    for name, error in (("placed_rewards:Plaiced", AttributeError), ("nowhere:X", ImportError)):
        config.reward_model.reward_manager = name
        with pytest.raises(error):
            load_reward_manager(config)
    assert REWARD_MANAGERS["naive"] is EpisodeRewardManager


def test_weights_combine_the_rewards_of_a_function(tokenizer, tmp_path):
    (tmp_path / "parts.py").write_text(
        "def parts(data_source, steps, extra_info):\n"
        "    return {'accuracy': extra_info['won'], 'brevity': 1 / len(steps)}\n"
    )
    config = make_config()
    config.custom_reward_function.path = str(tmp_path / "parts.py")
    config.custom_reward_function.name = "parts"
    config.reward_model.weights = {"accuracy": 2.0, "brevity": -1.0}
    data = make_rows(tokenizer, "append")
    scores = load_reward_manager(config)(data).sum(-1).tolist()
    lengths = data.non_tensor_batch["episode_lengths"].tolist()
    assert scores == pytest.approx([2.0 - 1 / length for length in lengths])
    parts = data.non_tensor_batch["reward_parts"][0]
    assert parts == {"accuracy": 1.0, "brevity": 1 / lengths[0], "score": parts["score"]}
    assert parts["score"] == pytest.approx(2.0 - 1 / lengths[0])
    config.reward_model.weights = {"acuracy": 1.0}
    with pytest.raises(ValueError, check=mentions("'acuracy'")):
        load_reward_manager(config)(data)


@pytest.fixture(scope="module")
def episode(tokenizer):
    return make_rows(tokenizer, "append")


def make_constant_manager(value):
    def mine(data_source, steps, extra_info):
        return value

    return EpisodeRewardManager(compute_score=mine)


@pytest.mark.parametrize("value", ["good", None, np.ones(1), torch.ones(2), 1j])
def test_custom_function_must_return_a_number(episode, value):
    with pytest.raises(
        TypeError,
        check=mentions("custom_reward_function mine", "task_id"),
    ):
        make_constant_manager(value)(episode)


@pytest.mark.parametrize(
    "value", [math.nan, -math.inf, 1e39, np.float32("nan"), torch.tensor(math.inf)]
)
def test_custom_function_must_return_a_finite_number(episode, value):
    task = episode.non_tensor_batch["task_id"][0]
    with pytest.raises(ValueError, check=mentions("mine", f"task_id '{task}'")):
        make_constant_manager(value)(episode)


@pytest.mark.parametrize(
    "value",
    [
        1,
        1.0,
        True,
        np.int64(1),
        np.float32(1),
        np.bool_(True),
        np.array(1.0),
        torch.tensor(1),
        Fraction(2, 2),
    ],
)
def test_custom_function_may_return_any_number_type(episode, value):
    assert make_constant_manager(value)(episode).sum(-1).tolist() == [1.0] * len(episode)


def test_custom_function_may_return_named_rewards(tokenizer):
    data = make_rows(tokenizer, "window")
    scores = make_constant_manager({"score": 0.5, "format": np.float32(1), "brevity": 2})(data)
    assert scores.sum(-1).tolist() == [0.5] * len(data)
    parts = data.non_tensor_batch["reward_parts"]
    assert list(parts) == [{"score": 0.5, "format": 1.0, "brevity": 2.0}] * len(data)


def test_single_number_writes_no_column_of_named_rewards(tokenizer):
    data = make_rows(tokenizer, "append")
    make_constant_manager(1.0)(data)
    assert "reward_parts" not in data.non_tensor_batch


@pytest.mark.parametrize(
    ("value", "error", "parts"),
    [
        ({"format": 1.0}, ValueError, ["'score'"]),
        ({"score": 1.0, "format": "good"}, TypeError, ["'format'", "str"]),
        ({"score": math.nan}, ValueError, ["'score'", "nan"]),
    ],
)
def test_named_rewards_must_be_finite_and_include_the_score(episode, value, error, parts):
    with pytest.raises(error, check=mentions(*parts)):
        make_constant_manager(value)(episode)


def test_unknown_manager_arguments_are_refused(monkeypatch):
    config = make_config()
    config.reward_model.reward_kwargs = {"penalti": 1}
    with pytest.raises(
        UserError,
        check=has_problem(
            "unknown_key", "reward_model.reward_kwargs", "{'penalti': 1}", "token_price"
        ),
    ):
        load_reward_manager(config)

    class Mine(EpisodeRewardManager):
        def __init__(self, penalty, function, scale=1.0):
            self.scale = scale

    monkeypatch.setitem(REWARD_MANAGERS, "mine", Mine)
    config.reward_model.reward_manager = "mine"
    with pytest.raises(UserError, check=has_problem("unknown_key", "", "scale")):
        load_reward_manager(config)
    config.reward_model.reward_kwargs = {"scale": 2.0}
    manager: Any = load_reward_manager(config)
    assert manager.scale == 2.0


def test_custom_file_is_loaded_as_a_separate_module(tmp_path):
    text = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Weights:\n    length: float = {}\n"
        "def f(**_):\n    return Weights().length\n"
    )
    for directory, length in (("one", 0.5), ("two", 0.25)):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "json.py").write_text(text.format(length))
    first, second = (
        load_function(str(tmp_path / directory / "json.py"), "f") for directory in ("one", "two")
    )
    assert (first(), second()) == (0.5, 0.25)
    assert sys.modules[first.__module__] is not sys.modules[second.__module__]
    assert sys.modules["json"] is json


@pytest.mark.parametrize(
    ("text", "error_name"), [("f = 1 / 0", "ZeroDivisionError"), ("exit(0)", "SystemExit")]
)
def test_custom_file_that_raises_leaves_no_module(tmp_path, monkeypatch, text, error_name):
    (tmp_path / "broken.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    known = set(sys.modules)
    with pytest.raises(ImportError, check=mentions("broken.py'", error_name)):
        load_function(str(tmp_path / "broken.py"), "f")
    with pytest.raises(ImportError, check=mentions("a.key='broken:f'", error_name)):
        load_import_path("broken:f", "a.key")
    assert set(sys.modules) == known


def test_custom_file_may_import_modules_in_its_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "helper_of_this_test.py").write_text("one = 1.0")
    (tmp_path / "mine.py").write_text(
        "import helper_of_this_test\n"
        "def f():\n    import helper_of_this_test as lazy\n    return lazy.one\n"
    )
    try:
        assert load_function(str(tmp_path / "mine.py"), "f")() == 1.0
    finally:
        sys.modules.pop("helper_of_this_test", None)


def test_exit_in_a_custom_function_is_an_error(episode):
    def leaving(data_source, steps, extra_info):
        sys.exit(0)

    manager = EpisodeRewardManager(compute_score=limit_call_time(leaving, 5.0))
    with pytest.raises(RuntimeError, check=mentions("custom_reward_function leaving", "task_id")):
        manager(episode)


def test_penalty_is_read_from_the_actor_section():
    config = make_config()
    manager: Any = load_reward_manager(config)
    assert manager.invalid_action_penalty == 0.0
    config.actor_rollout_ref.actor.use_invalid_action_penalty = True
    config.actor_rollout_ref.actor.invalid_action_penalty_coef = 0.5
    manager = load_reward_manager(config)
    assert manager.invalid_action_penalty == 0.5


def test_trajectory_with_scoring_timeout_gets_the_group_mean(tokenizer, tmp_path, caplog):
    data = make_rows(tokenizer, "append")
    late = data.non_tensor_batch["traj_uid"][0]
    path = tmp_path / "scores.py"
    path.write_text(
        "import time\n"
        "calls = []\n"
        "def compute_score(data_source, steps, extra_info):\n"
        "    calls.append(1)\n"
        "    while len(calls) == 1:\n"
        "        time.sleep(0.01)\n"
        "    return 0.25 * len(calls)\n"
    )
    config = make_config()
    config.custom_reward_function.path = str(path)
    config.custom_reward_function.timeout_s = 0.2
    manager: Any = load_reward_manager(config)
    outcomes = manager.compute_outcomes(data)
    uids = data.non_tensor_batch["uid"].tolist()
    peers = [
        o
        for o, uid, t in zip(outcomes, uids, data.non_tensor_batch["traj_uid"], strict=True)
        if uid == uids[0] and t != late
    ]
    assert outcomes[0] == sum(peers) / len(peers) == 0.5 and outcomes[2:] == [0.75, 1.0]
    assert "compute_score, task_id 'number_line" in caplog.text and "0.2 s" in caplog.text


class UnreadableError(Exception):
    def __str__(self):
        raise ValueError("no message")

    __repr__ = __str__


@pytest.mark.parametrize("failure", [KeyError("a"), UnreadableError(), SystemExit(0), "nan", None])
def test_trajectory_whose_function_fails_gets_the_group_mean(tokenizer, caplog, failure):
    """An exception and an invalid value are treated like a timeout; only a total failure ends."""
    data = make_rows(tokenizer, "append")
    outcomes_in_order: Any = iter([failure, 0.5, 0.75, 1.0])

    def mine(data_source, steps, extra_info):
        outcome = next(outcomes_in_order)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    manager = EpisodeRewardManager(compute_score=limit_call_time(mine, 5.0))
    assert manager.compute_outcomes(data) == [0.5, 0.5, 0.75, 1.0]
    assert data.non_tensor_batch["aborted"].tolist() == [True, False, False, False]
    assert data.meta_info["metrics"]["critic/score/failed"] == 1.0
    assert "custom_reward_function mine, task_id 'number_line" in caplog.text


def test_function_that_always_raises_is_named_with_its_line(episode):
    def mine(data_source, steps, extra_info):
        raise KeyError("speed")

    manager = EpisodeRewardManager(compute_score=limit_call_time(mine, 5.0))
    with pytest.raises(
        RuntimeError, check=mentions("custom_reward_function mine", "KeyError('speed')", __file__)
    ):
        manager(episode)


def test_function_that_stops_working_ends_the_run_at_the_third_batch(tokenizer):
    """A single batch may consist of tasks for which the function fails (retries of ReMax)."""
    is_broken = False

    def mine(data_source, steps, extra_info):
        return math.nan if is_broken else 1.0

    manager = EpisodeRewardManager(compute_score=limit_call_time(mine, 5.0))
    data = make_rows(tokenizer, "append")
    assert manager.compute_outcomes(data) == [1.0] * 4
    is_broken = True
    assert [manager.compute_outcomes(data) for _ in range(2)] == [[0.0] * 4] * 2
    with pytest.raises(ValueError, check=mentions("custom_reward_function mine")):
        manager.compute_outcomes(data)


@pytest.mark.parametrize("history", ["append", "window"])
def test_named_rewards_after_a_timeout_are_group_means(tokenizer, history):
    """Every row has all named rewards, because gdpo refuses missing ones."""
    data = make_rows(tokenizer, history)
    trajectories, uids = data.non_tensor_batch["traj_uid"], data.non_tensor_batch["uid"]
    by_uid = dict(zip(trajectories, uids, strict=True))
    first, *other_groups = dict.fromkeys(uids)
    of_first = [traj for traj in by_uid if by_uid[traj] == first]
    late = {of_first[0], *(traj for traj in by_uid if by_uid[traj] == other_groups[0])}
    order = iter(by_uid)
    calls = []

    def mine(data_source, steps, extra_info):
        if next(order) in late:
            raise TimeLimitError("mine took over 1 s")
        calls.append(1)
        return {"score": 0.0, "a": float(len(calls)), "b": 3.0}

    EpisodeRewardManager(compute_score=mine)(data)
    parts = dict(zip(trajectories, data.non_tensor_batch["reward_parts"], strict=True))
    peers = [parts[traj]["a"] for traj in of_first[1:]]
    assert peers and parts[of_first[0]] == {"score": 0.0, "a": np.mean(peers), "b": 3.0}
    without_scores = next(traj for traj in by_uid if by_uid[traj] == other_groups[0])
    assert parts[without_scores] == {"score": 0.0, "a": 0.0, "b": 0.0}
    mask = data.batch["response_mask"]
    advantages, _ = compute_gdpo_outcome_advantage(
        mask, uids, data.non_tensor_batch["reward_parts"], ["a", "b"], traj_index=trajectories
    )
    assert advantages.isfinite().all()


def test_batch_without_any_score_has_named_rewards_of_zero(tokenizer):
    """The names are those of earlier batches. gdpo would refuse rows without them."""
    is_broken = False

    def mine(data_source, steps, extra_info):
        return math.nan if is_broken else {"score": 1.0, "grade": 2.0}

    manager = EpisodeRewardManager(compute_score=mine)
    data = make_rows(tokenizer, "append")
    manager(data)
    is_broken = True
    data = make_rows(tokenizer, "append")
    assert manager.compute_outcomes(data) == [0.0] * 4
    parts = data.non_tensor_batch["reward_parts"]
    assert parts.tolist() == [{"score": 0.0, "grade": 0.0}] * 4
    advantages, _ = compute_gdpo_outcome_advantage(
        data.batch["response_mask"], data.non_tensor_batch["uid"], parts, ["grade"]
    )
    assert not advantages.any()


def test_function_that_always_exceeds_its_time_limit_ends_the_run(episode):
    def endless(data_source, steps, extra_info):
        time.sleep(60)
        return 1.0

    manager = EpisodeRewardManager(compute_score=limit_call_time(endless, 0.05))
    with pytest.raises(TimeLimitError, check=mentions("endless", "task_id")):
        manager.compute_outcomes(episode)


def test_time_limits_exceeded_in_three_batches_end_the_run(episode):
    is_slow = False

    def slow(data_source, steps, extra_info):
        time.sleep(60 if is_slow else 0)
        return 1.0

    manager = EpisodeRewardManager(compute_score=limit_call_time(slow, 0.05))
    assert manager.compute_outcomes(episode) == [1.0] * len(episode)
    is_slow = True
    assert [manager.compute_outcomes(episode) for _ in range(2)] == [[0.0] * len(episode)] * 2
    with pytest.raises(TimeLimitError, check=mentions("slow", "task_id")):
        manager.compute_outcomes(episode)


@pytest.mark.parametrize(
    ("path", "error", "part"),
    [
        ("own.py", ValueError, "own.py:NAME"),
        (":f", ValueError, "a.key=':f'"),
        ("none.py:f", FileNotFoundError, "a.key='none.py:f'"),
        ("own.py:good", AttributeError, "'goods'"),
        ("own.py:value", TypeError, "own.py:value"),
        ("json:dump_s", AttributeError, "'dumps'"),
    ],
)
def test_invalid_import_path_is_refused_with_its_key(path, error, part, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("value = 3\ndef goods(): return value\n")
    assert load_import_path("own.py:goods", "a.key")() == 3
    assert load_import_path("json:dumps", "a.key") is json.dumps
    with pytest.raises(error, check=mentions("a.key=", part)) as caught:
        load_import_path(path, "a.key")
    assert "a.key.path" not in str(caught.value)


def test_relative_lengths_by_hand():
    """Lengths are compared with the group's successes, also lengths that are far from theirs."""
    trajectories = [  # group, success, number of sampled tokens, sigmoid(z)
        ("a", True, 10, 0.2689),  # mean 20, std 10
        ("a", True, 30, 0.7311),
        ("a", False, 20, 0.5),
        ("b", True, 1000, 0.2689),  # mean 1001, std 1
        ("b", True, 1002, 0.7311),
        ("b", False, 1, 0.0),  # z = -1000
        ("b", False, 2001, 1.0),
        ("c", True, 7, 0.5),  # only one success
        ("c", False, 1, 0.5),
        ("d", False, 1, 0.5),  # no success
    ]
    groups, successes, lengths, expected = zip(*trajectories, strict=True)
    response_mask = torch.arange(2001)[None] < torch.tensor(lengths)[:, None]
    columns = {
        "uid": list(groups),
        "traj_uid": [str(number) for number in range(len(groups))],
        "won": np.array(successes),
    }
    data = DataProto.from_dict({"response_mask": response_mask.long()}, columns)
    relative_lengths = compute_relative_lengths(data, group_rows_by_trajectory(data))
    assert list(relative_lengths.values()) == pytest.approx(expected, abs=1e-4)
