"""Agents behind an ``openai`` client: their rows are those of the native collector, and what breaks
is data.
"""

import asyncio
from typing import Any

import numpy as np
import pytest

from agent_system.environments.env_registry import get_package
from agent_system.environments.manager import make_envs
from agent_system.multi_turn_rollout.collector_worker import CollectorWorker
from agent_system.multi_turn_rollout.engine_client import RolloutWorkerFailed
from agent_system.multi_turn_rollout.rollout_loop import TrajectoryCollector
from agent_system.multi_turn_rollout.rollout_settings import RolloutSettings
from agent_system.multi_turn_rollout.trajectory import RolloutSpec
from tests.helpers import line_agent
from tests.helpers.engine_cases import rollout_section
from tests.helpers.play import Group, make_config, walking_policy
from tests.helpers.scripted_engine import ScriptedEngine
from tests.helpers.tiny_model import make_tiny_policy, make_tiny_tokenizer
from verl.utils.sampling import StopReason
from verl.workers.rollout import create_engine
from verl.workers.rollout.worker import RolloutWorker

HOME = "tests.helpers.line_agent"
TENSORS = (
    "prompts",
    "responses",
    "input_ids",
    "attention_mask",
    "position_ids",
    "response_mask",
    "step_ids",
    "rollout_log_probs",
)
COLUMNS = ("uid", "traj_uid", "task_id", "data_source", "episode_rewards", "won", "truncated")


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


@pytest.fixture
def rows():
    """Play the first tasks of ``config`` with ``engine``."""
    collectors = []

    def play(config, tokenizer, engine, groups: int = 2, is_train: bool = True):
        collector = TrajectoryCollector(config, tokenizer)
        collectors.append(collector)
        envs = make_envs(config)[0]
        if config.env.env_name == "number_line":
            envs.task_list = [
                task for task in envs.task_list if abs(task["start"] - task["target"]) >= 3
            ]
        batch = envs.gen_batch(1, groups)
        return collector.multi_turn_loop(batch, Group([engine]), envs, is_train)

    yield play
    for collector in collectors:
        collector.close()


def agent_config(agent: str = "play", tasks: str = "tasks", placement: str = "inline", **env):
    places = {"path": f"{HOME}:{agent}", "tasks": f"{HOME}:{tasks}", "placement": placement}
    return make_config("agent", kwargs=places, **env)


def assert_same_rows(found, expected) -> None:
    assert len(found) == len(expected) > 0
    for name in TENSORS:
        assert found.batch[name].tolist() == expected.batch[name].tolist(), name
    for name in COLUMNS:
        assert list(found.non_tensor_batch[name]) == list(expected.non_tensor_batch[name]), name


def test_rows_through_an_openai_client_are_the_native_ones(rows, tokenizer):
    played = [
        rows(config, tokenizer, ScriptedEngine(tokenizer, walking_policy(), version=7), 3)
        for config in (make_config(n=2), agent_config(n=2))
    ]
    native, agents = played
    assert_same_rows(agents, native)
    assert native.non_tensor_batch["won"].all() and native.batch["response_mask"].sum() > 0
    versions = [data.meta_info["metrics"]["rollout/policy_version"] for data in played]
    assert versions == [7.0, 7.0]


def test_rows_of_a_sampling_engine_are_the_native_ones(rows, tmp_path):
    """Seeds, stops and lengths are asked for alike: the same draws come back."""
    policy = make_tiny_policy(tmp_path / "policy", std=0.2)
    tokenizer = make_tiny_tokenizer()
    # One at a time: beside other requests the same draw has a log-prob rounded otherwise.
    section = rollout_section(max_model_len=1024, max_num_seqs=1)

    def played(config):
        engine = create_engine("hf", section, str(policy), seed=3, num_threads=1)
        return rows(config, tokenizer, RolloutWorker(None, "", engine=engine), 4)

    limits: dict[str, Any] = {"n": 2, "max_turn_tokens": 24, "max_steps": 4}
    native = played(make_config(**limits))
    agents = played(agent_config(**limits))
    assert_same_rows(agents, native)
    lengths = native.non_tensor_batch["episode_lengths"]
    assert max(lengths) > 1, "no turn was followed by another: the bridge was not compared"
    assert "length" in native.non_tensor_batch["truncated"]
    assert len(np.unique(native.batch["rollout_log_probs"])) > 50


def replies(request, prompt: str) -> str:
    """As many words as the prompt has messages, so that replies differ."""
    return "look " * prompt.count("<|im_start|>") + "<|im_end|>"


def test_what_continues_extends_a_row_and_what_does_not_begins_one(rows, tokenizer):
    engine = ScriptedEngine(tokenizer, replies)
    data = rows(agent_config("fork", n=1), tokenizer, engine, groups=1)
    steps = [[step.step for step in row] for row in data.non_tensor_batch["steps"]]
    assert steps == [[0, 1, 3], [2], [4]]
    assert len(set(data.non_tensor_batch["traj_uid"])) == 1
    assert list(data.non_tensor_batch["episode_rewards"]) == [1.0] * 3
    for row, records in enumerate(data.non_tensor_batch["steps"]):
        real = data.batch["input_ids"][row][data.batch["attention_mask"][row].bool()].tolist()
        for record in records:
            asked = engine.requests[record.step]
            start, end = record.span
            assert real[:start] == asked.prompt_ids, "the row begins as the engine was asked"
            assert tokenizer.decode(real[start:end]).startswith(record.response)
    rewards = [list(row) for row in data.non_tensor_batch["step_rewards"]]
    assert rewards == [[0.0, 0.0, 0.0], [0.0], [1.0]], "the last turn earns the reward"


def test_with_window_history_every_request_is_a_row(rows, tokenizer):
    engine = ScriptedEngine(tokenizer, replies)
    data = rows(agent_config("fork", n=1, history="window"), tokenizer, engine, groups=1)
    assert [len(row) for row in data.non_tensor_batch["steps"]] == [1] * 5


def test_an_agent_may_be_a_coroutine_that_asks_twice_at_once(rows, tokenizer):
    engine = ScriptedEngine(tokenizer, replies)
    data = rows(agent_config("play_asynchronously", n=1), tokenizer, engine, groups=1)
    assert len(data) == 2 and list(data.non_tensor_batch["episode_rewards"]) == [0.5, 0.5]
    assert sorted(row[0].step for row in data.non_tensor_batch["steps"]) == [0, 1]


@pytest.fixture(scope="module")
def misbehaved(tokenizer):
    """The trajectories of agents that misbehave, by what they did; one process, one at a time."""
    config = agent_config(
        "misbehave",
        "deeds",
        placement="process",
        max_steps=4,
        num_workers=1,
        envs_per_worker=1,
        step_timeout_s=12.0,
    )
    settings = RolloutSettings.from_config(config, get_package("agent"), is_train=True)
    jobs = [
        RolloutSpec(number, task, f"group-{number}", f"group-{number}/0", 0, 0)
        for number, task in enumerate(line_agent.deeds("train"))
    ]

    async def play():
        engine = ScriptedEngine(tokenizer, replies)
        worker = CollectorWorker(config.env, tokenizer, [engine])
        try:
            return await worker.collect(jobs, settings)
        finally:
            await worker.close()

    played = asyncio.run(play()).trajectories
    return {trajectory.spec.task["deed"]: trajectory for trajectory in played}


@pytest.mark.parametrize(
    ("deed", "reason", "detail"),
    [
        ("crash", "env_error", "AgentBroke('the agent broke')"),
        ("hang", "env_timeout", "step took over 12 s"),
        ("die", "env_dead", "died"),
        ("leave", "env_error", "the agent called exit with status 3"),
        ("earn nothing", "env_error", "without returning or posting a reward"),
        ("not a number", "env_error", "reward: it returned nan, not a finite number"),
    ],
)
def test_an_agent_that_fails_breaks_its_play_alone(misbehaved, deed, reason, detail):
    trajectory = misbehaved[deed]
    assert trajectory.aborted == reason and detail in trajectory.abort_detail
    assert len(trajectory.turns) == 1, "what was sampled until then is there to be looked at"
    assert misbehaved["play well"].aborted is None and misbehaved["play well"].reward == 1.0


@pytest.mark.parametrize(
    ("deed", "reward", "won", "truncated", "turns"),
    [
        ("earn twice", 1.0, True, None, 1),
        ("crash after", 0.25, True, None, 1),
        ("overrun", 0.0, False, "steps", 4),
        ("too long", 0.0, False, "budget", 1),
        ("recover", 1.0, True, None, 2),
    ],
)
def test_a_play_that_was_rewarded_or_cut_counts(misbehaved, deed, reward, won, truncated, turns):
    trajectory = misbehaved[deed]
    assert trajectory.aborted is None, trajectory.abort_detail
    assert (trajectory.reward, trajectory.won) == (reward, won)
    assert (trajectory.truncated, len(trajectory.turns)) == (truncated, turns)


def test_what_the_engine_gives_up_breaks_the_play(rows, tokenizer):
    """Whatever the agent makes of the error: a turn is missing."""
    engine = ScriptedEngine(tokenizer, lambda request, prompt: StopReason.ABORT)
    config = agent_config("shrug", n=1)
    data = rows(config, tokenizer, engine, groups=1, is_train=False)
    assert data.non_tensor_batch["aborted"].all()
    assert data.meta_info["metrics"]["rollout/aborted_engine"] == 1.0


class DeadEngine(ScriptedEngine):
    async def submit(self, requests) -> None:
        raise RuntimeError("gone")


def test_a_dead_engine_ends_the_run_whatever_agents_make_of_it(rows, tokenizer):
    engine = DeadEngine(tokenizer, replies)
    with pytest.raises(RolloutWorkerFailed, match="gone"):
        rows(agent_config("linger", n=1), tokenizer, engine, groups=1)
    assert line_agent.LINGERED == [], "it was raised while the agent was still playing"
    line_agent.LEAVE.set()


def test_a_reply_that_nobody_waited_for_is_no_row(rows, tokenizer):
    engine = ScriptedEngine(tokenizer, replies, delay_s=3.0)
    data = rows(agent_config("lose_patience", n=1), tokenizer, engine, groups=1)
    assert [len(row) for row in data.non_tensor_batch["steps"]] == [1]
    assert list(data.non_tensor_batch["episode_rewards"]) == [1.0]


def test_a_reply_after_the_reward_is_refused_and_no_row(rows, tokenizer):
    engine = ScriptedEngine(tokenizer, replies, delay_s=3.0)
    config = agent_config("leave_one_behind", n=1)
    data = rows(config, tokenizer, engine, groups=1, is_train=False)
    assert data.batch["response_mask"].sum() == 0 and len(line_agent.REFUSED) == 1
    assert list(data.non_tensor_batch["episode_rewards"]) == [1.0]
    assert not data.non_tensor_batch["aborted"].any()


def test_broken_plays_leave_their_group_out(rows, tokenizer):
    """Neither a 0 nor a member of any mean: the default ``env.on_abort`` drops the group."""
    engine = ScriptedEngine(tokenizer, walking_policy())
    data = rows(agent_config("break_once", n=2), tokenizer, engine, groups=3)
    metrics = data.meta_info["metrics"]
    broken = metrics["rollout/left_out_aborted"]
    assert broken == len(line_agent.BROKEN) > 0
    assert metrics["rollout/left_out_group_of_aborted"] == broken
    assert len(data) == 6 - 2 * broken
    assert not line_agent.BROKEN & set(data.non_tensor_batch["task_id"])
