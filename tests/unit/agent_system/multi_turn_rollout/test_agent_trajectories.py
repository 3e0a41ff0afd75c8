"""Agents with an ``openai`` client: rows equal those of the native collector, failures are data."""

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
from tests.helpers import number_line_agents
from tests.helpers.engine_cases import rollout_section
from tests.helpers.number_line_world import Group, make_config, walking_policy
from tests.helpers.scripted_engine import ScriptedEngine
from tests.helpers.tiny_model import make_tiny_policy, make_tiny_tokenizer
from tests.helpers.trl_templates import template_names, trl_tokenizer
from verl.utils.sampling import StopReason
from verl.workers.rollout import create_engine
from verl.workers.rollout.worker import RolloutWorker

AGENTS = "tests.helpers.number_line_agents"
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
    """Generate trajectories for the first tasks of ``config`` with ``engine``."""
    collectors = []

    def generate(config, tokenizer, engine, groups: int = 2, is_train: bool = True):
        collector = TrajectoryCollector(config, tokenizer)
        collectors.append(collector)
        envs = make_envs(config)[0]
        if config.env.env_name == "number_line":
            far_tasks = [t for t in envs.task_list if abs(t["start"] - t["target"]) >= 3]
            envs.replace_tasks(far_tasks)
        batch = envs.gen_batch(1, groups)
        return collector.multi_turn_loop(batch, Group([engine]), envs, is_train)

    yield generate
    for collector in collectors:
        collector.close()


def agent_config(agent: str = "play", tasks: str = "tasks", placement: str = "inline", **env):
    kwargs = {"path": f"{AGENTS}:{agent}", "tasks": f"{AGENTS}:{tasks}", "placement": placement}
    return make_config("agent", kwargs=kwargs, **env)


def assert_same_rows(actual, expected) -> None:
    assert len(actual) == len(expected) > 0
    for name in TENSORS:
        assert actual.batch[name].tolist() == expected.batch[name].tolist(), name
    for name in COLUMNS:
        assert list(actual.non_tensor_batch[name]) == list(expected.non_tensor_batch[name]), name


def test_rows_through_an_openai_client_equal_native_rows(rows, tokenizer):
    batches = [
        rows(config, tokenizer, ScriptedEngine(tokenizer, walking_policy(), version=7), 3)
        for config in (make_config(n=2), agent_config(n=2))
    ]
    native, agents = batches
    assert_same_rows(agents, native)
    assert native.non_tensor_batch["won"].all() and native.batch["response_mask"].sum() > 0
    versions = [data.meta_info["metrics"]["rollout/policy_version"] for data in batches]
    assert versions == [7.0, 7.0]


def test_replies_of_models_that_are_not_trained_are_in_no_row(rows, tokenizer):
    config = agent_config("play_with_advice", n=1)
    config.actor_rollout_ref.rollout.lora_sync = "adapter"
    config.actor_rollout_ref.model.adapters = {"judge": "unused"}

    def script(request, prompt):
        walk = walking_policy()
        return walk(request, prompt) if request.model == "policy" else "left</action>"

    engine = ScriptedEngine(tokenizer, script, version=7)
    agents = rows(config, tokenizer, engine, 3)
    native = rows(make_config(n=1), tokenizer, ScriptedEngine(tokenizer, walking_policy()), 3)
    assert_same_rows(agents, native)
    others = [request for request in engine.requests if request.model != "policy"]
    assert sorted(request.model for request in others) == ["base"] * 3 + ["judge"] * 3
    assert len({request.seed for request in others}) == 6
    config.actor_rollout_ref.rollout.lora_sync = "merged"
    with pytest.raises(RuntimeError):  # the agent ended: the endpoint offers only the policy
        rows(config, tokenizer, engine, 1)


def test_untrained_models_answer_after_the_last_turn(rows, tokenizer):
    config = agent_config("take_one_turn_and_ask_base", n=1, max_steps=1)
    config.actor_rollout_ref.rollout.lora_sync = "adapter"
    engine = ScriptedEngine(tokenizer, lambda _request, _prompt: "left</action>")
    data = rows(config, tokenizer, engine, 2)
    assert data.non_tensor_batch["episode_rewards"].tolist() == [1.0, 1.0]
    assert not any(data.non_tensor_batch["truncated"])


def test_rows_of_a_sampling_engine_equal_native_rows(rows, tmp_path):
    """Seeds, stops and lengths of the requests are equal, so the samples are equal."""
    policy = make_tiny_policy(tmp_path / "policy", std=0.2)
    tokenizer = make_tiny_tokenizer()
    # One request at a time: batching changes the rounding of the log-probs.
    section = rollout_section(max_model_len=1024, max_num_seqs=1)

    def generate(config):
        engine = create_engine("hf", section, str(policy), seed=3, num_threads=1)
        return rows(config, tokenizer, RolloutWorker(None, "", engine=engine), 4)

    limits: dict[str, Any] = {"n": 2, "max_turn_tokens": 24, "max_steps": 4}
    native = generate(make_config(**limits))
    agents = generate(agent_config(**limits))
    assert_same_rows(agents, native)
    lengths = native.non_tensor_batch["episode_lengths"]
    assert max(lengths) > 1, "without a second turn the bridge is not compared"
    assert "length" in native.non_tensor_batch["truncated"]
    assert len(np.unique(native.batch["rollout_log_probs"])) > 50


@pytest.mark.parametrize("thought", ["", "<think>\nhm\n</think>\n\n"])
def test_agent_with_tools_trains_on_the_sampled_calls(rows, thought):
    """The template renders tools and results; calls are parsed from the sampled tokens.

    The client sends the received thoughts back, and the template keeps them.
    """
    if "qwen3" not in template_names():
        pytest.skip("trl is not installed")
    tokenizer = trl_tokenizer("qwen3")
    call = (
        thought
        + '<tool_call>\n{"name": "look", "arguments": {"place": "%s"}}\n</tool_call><|im_end|>'
    )

    def write_reply(request, prompt: str) -> str:
        if "A mug" in prompt:
            return f"{thought}attic<|im_end|>"
        return call % ("attic" if "Nothing." in prompt else "cellar")

    engine = ScriptedEngine(tokenizer, write_reply)
    config = agent_config("call_tools", n=1, history="chat", max_turn_tokens=96)
    data = rows(config, tokenizer, engine, groups=1)
    assert data.non_tensor_batch["won"].all()
    (records,) = data.non_tensor_batch["steps"]
    assert [record.step for record in records] == [0, 1, 2], "one row: no thought is removed"
    is_sampled = data.batch["response_mask"][0].bool()
    sampled = tokenizer.decode(data.batch["responses"][0][is_sampled])
    assert sampled == call % "cellar" + call % "attic" + f"{thought}attic<|im_end|>"
    last_prompt = tokenizer.decode(engine.requests[-1].prompt_ids)
    assert "Look at a place." in last_prompt and "<tool_response>\nNothing." in last_prompt
    end_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert engine.requests[-1].prompt_ids.count(end_id) == 6, "that of a result is plain text"


def replies(request, prompt: str) -> str:
    """Return as many words as the prompt has messages, so that replies differ."""
    return "look " * prompt.count("<|im_start|>") + "<|im_end|>"


def test_continued_request_extends_its_row(rows, tokenizer):
    engine = ScriptedEngine(tokenizer, replies)
    data = rows(agent_config("fork", n=1), tokenizer, engine, groups=1)
    steps = [[step.step for step in row] for row in data.non_tensor_batch["steps"]]
    assert steps == [[0, 1, 3], [2], [4]]
    assert len(set(data.non_tensor_batch["traj_uid"])) == 1
    assert list(data.non_tensor_batch["episode_rewards"]) == [1.0] * 3
    for row, records in enumerate(data.non_tensor_batch["steps"]):
        row_tokens = data.batch["input_ids"][row][data.batch["attention_mask"][row].bool()].tolist()
        for record in records:
            request = engine.requests[record.step]
            start, end = record.span
            assert row_tokens[:start] == request.prompt_ids, (
                "the row begins with the prompt of the request"
            )
            assert tokenizer.decode(row_tokens[start:end]).startswith(record.response)
    rewards = [list(row) for row in data.non_tensor_batch["step_rewards"]]
    assert rewards == [[0.0, 0.0, 0.0], [0.0], [1.0]], "the last turn gets the reward"


def test_with_window_history_every_request_is_a_row(rows, tokenizer):
    engine = ScriptedEngine(tokenizer, replies)
    data = rows(agent_config("fork", n=1, history="window"), tokenizer, engine, groups=1)
    assert [len(row) for row in data.non_tensor_batch["steps"]] == [1] * 5


def test_agent_may_send_the_sampling_of_training_in_validation_too(rows, tokenizer):
    """Validation still samples with its values, which are greedy by default."""
    config = agent_config("send_sampling_values", n=1)
    config.actor_rollout_ref.rollout.temperature = 0.7
    for is_train, temperature in ((True, 0.7), (False, 0.0)):
        engine = ScriptedEngine(tokenizer, replies)
        data = rows(config, tokenizer, engine, groups=1, is_train=is_train)
        assert list(data.non_tensor_batch["episode_rewards"]) == [1.0]
        assert [request.temperature for request in engine.requests] == [temperature]


def test_coroutine_agent_may_send_two_requests_at_once(rows, tokenizer):
    engine = ScriptedEngine(tokenizer, replies)
    data = rows(agent_config("play_asynchronously", n=1), tokenizer, engine, groups=1)
    assert len(data) == 2 and list(data.non_tensor_batch["episode_rewards"]) == [0.5, 0.5]
    assert sorted(row[0].step for row in data.non_tensor_batch["steps"]) == [0, 1]


@pytest.fixture(scope="module")
def faulty_trajectories(tokenizer):
    """Return the trajectories of faulty agents by fault. One process runs them one by one."""
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
    specs = [
        RolloutSpec(number, task, f"group-{number}", f"group-{number}/0", 0)
        for number, task in enumerate(number_line_agents.deeds("train"))
    ]

    async def generate():
        engine = ScriptedEngine(tokenizer, replies)
        worker = CollectorWorker(config.env, tokenizer, [engine])
        try:
            return await worker.collect(specs, settings)
        finally:
            await worker.close()

    trajectories = asyncio.run(generate()).trajectories
    return {trajectory.spec.task["deed"]: trajectory for trajectory in trajectories}


@pytest.mark.parametrize(
    ("deed", "reason", "detail"),
    [
        ("crash", "env_error", "AgentBroke('the agent broke')"),
        ("hang", "env_timeout", "12 s"),
        ("die", "env_dead", "died"),
        ("leave", "env_error", "status 3"),
        ("earn nothing", "env_error", "reward"),
        ("not a number", "env_error", "nan"),
    ],
)
def test_failed_agent_aborts_only_its_trajectory(faulty_trajectories, deed, reason, detail):
    trajectory = faulty_trajectories[deed]
    assert trajectory.aborted == reason and detail in trajectory.abort_detail
    assert len(trajectory.turns) == 1, "the turns before the failure are kept"
    assert (
        faulty_trajectories["play well"].aborted is None
        and faulty_trajectories["play well"].reward == 1.0
    )


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
def test_rewarded_or_truncated_trajectory_counts(
    faulty_trajectories, deed, reward, won, truncated, turns
):
    trajectory = faulty_trajectories[deed]
    assert trajectory.aborted is None, trajectory.abort_detail
    assert (trajectory.reward, trajectory.won) == (reward, won)
    assert (trajectory.truncated, len(trajectory.turns)) == (truncated, turns)


def test_request_aborted_by_the_engine_aborts_the_trajectory(rows, tokenizer):
    """The trajectory lacks a turn, however the agent handles the error."""
    engine = ScriptedEngine(tokenizer, lambda request, prompt: StopReason.ABORT)
    config = agent_config("shrug", n=1)
    data = rows(config, tokenizer, engine, groups=1, is_train=False)
    assert data.non_tensor_batch["aborted"].all()
    assert data.meta_info["metrics"]["rollout/aborted_engine"] == 1.0


class DeadEngine(ScriptedEngine):
    async def submit(self, requests) -> None:
        raise RuntimeError("gone")


def test_dead_engine_ends_the_run_while_the_agent_runs(rows, tokenizer):
    engine = DeadEngine(tokenizer, replies)
    with pytest.raises(RolloutWorkerFailed, match="gone"):
        rows(agent_config("linger", n=1), tokenizer, engine, groups=1)
    assert number_line_agents.LINGERED == [], "the error is raised while the agent is still running"
    number_line_agents.LEAVE.set()


def test_reply_that_the_agent_did_not_wait_for_is_no_row(rows, tokenizer):
    engine = ScriptedEngine(tokenizer, replies, delay_s=3.0)
    data = rows(agent_config("lose_patience", n=1), tokenizer, engine, groups=1)
    assert [len(row) for row in data.non_tensor_batch["steps"]] == [2]
    assert list(data.non_tensor_batch["episode_rewards"]) == [1.0]
    assert len(engine.requests) == 3
    # The cancelled request leaves no gap in the numbers of turns: state 1 follows state 0.
    assert [record.step for record in data.non_tensor_batch["steps"][0]] == [0, 1]
    assert data.non_tensor_batch["step_index"].tolist() == [[0, 1]]
    is_sampled = data.batch["response_mask"].bool()
    assert data.batch["step_ids"][is_sampled].unique().tolist() == [0, 1]
    assert data.batch["step_ids"][~is_sampled].unique().tolist() == [-1]


def test_request_after_the_reward_is_refused_and_no_row(rows, tokenizer):
    engine = ScriptedEngine(tokenizer, replies, delay_s=3.0)
    config = agent_config("leave_one_behind", n=1)
    data = rows(config, tokenizer, engine, groups=1, is_train=False)
    assert data.batch["response_mask"].sum() == 0 and len(number_line_agents.REFUSED) == 1
    assert list(data.non_tensor_batch["episode_rewards"]) == [1.0]
    assert not data.non_tensor_batch["aborted"].any()


def test_failed_trajectory_drops_its_group(rows, tokenizer):
    """The default ``env.on_abort`` drops the whole group. A failure does not count as return 0."""
    engine = ScriptedEngine(tokenizer, walking_policy())
    data = rows(agent_config("break_once", n=2), tokenizer, engine, groups=3)
    metrics = data.meta_info["metrics"]
    num_failed = metrics["rollout/left_out_aborted"]
    assert num_failed == len(number_line_agents.BROKEN) > 0
    assert metrics["rollout/left_out_group_of_aborted"] == num_failed
    assert len(data) == 6 - 2 * num_failed
    assert not number_line_agents.BROKEN & set(data.non_tensor_batch["task_id"])
