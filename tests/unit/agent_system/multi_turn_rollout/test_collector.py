"""Collection of trajectories with a scripted engine and a real environment, without Ray or a
model.
"""

import asyncio
from typing import Any

import pytest

from agent_system.environments.env import EnvFailure
from agent_system.environments.env_package.number_line.package import NumberLinePrompts
from agent_system.environments.manager import make_envs
from agent_system.environments.pool.environment_pool import PoolSession
from agent_system.environments.tasks import GroupMismatch
from agent_system.multi_turn_rollout.collector_group import shard_by_group
from agent_system.multi_turn_rollout.engine_client import (
    EngineClient,
    RolloutWorkerFailed,
)
from agent_system.multi_turn_rollout.packing import select_groups_with_differing_returns
from agent_system.multi_turn_rollout.rollout_loop import TrajectoryCollector
from agent_system.multi_turn_rollout.trajectory import RolloutSpec, Trajectory, make_rollout_specs
from agent_system.tokens.bridge import TOKEN_SPLIT_CHARACTER
from tests.helpers.number_line_world import Group, make_config, make_world, walk, walking_policy
from tests.helpers.refusals import mentions
from tests.helpers.scripted_engine import ScriptedEngine
from tests.helpers.tiny_model import make_tiny_tokenizer
from verl.records import NUM_RANKS, PRICE_MULTIPLIER
from verl.trainer.ppo.minibatch_sharding import balance_rows
from verl.utils.chat_template import UnsupportedTemplateError
from verl.utils.sampling import SamplingResult, StopReason


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


@pytest.fixture
def generate(tokenizer):
    collectors = []

    def run(config, script=None, groups: int = 2, is_train: bool = True, engines: int = 1):
        group, envs, workers = make_world(tokenizer, config, script, engines)
        collector = TrajectoryCollector(config, tokenizer)
        collectors.append(collector)
        batch = envs.gen_batch(1, groups)
        return collector.multi_turn_loop(batch, group, envs, is_train), workers

    yield run
    for collector in collectors:
        collector.close()


@pytest.mark.parametrize("levels", [False, True])
@pytest.mark.parametrize(("history", "ranks"), [("append", 2), ("window", 3)])
def test_rows_are_packed_in_the_order_for_the_ranks(tokenizer, history, ranks, levels):
    """The order is that of ``balance_rows`` after packing. Rows of levels get it later."""
    config = make_config(history=history, levels=levels)
    collector = TrajectoryCollector(config, tokenizer)
    batches = []
    for num_ranks in (1, ranks):
        group, envs, _ = make_world(tokenizer, config, walking_policy(levels))
        tasks = envs.gen_batch(1, 4)
        tasks.meta_info[NUM_RANKS] = num_ranks
        batches.append(collector.multi_turn_loop(tasks, group, envs))
    collector.close()
    plain, packed = batches
    assert packed.meta_info[NUM_RANKS] == (1 if levels else ranks)
    traj_uids = list(plain.non_tensor_batch["traj_uid"])
    for data in batches:
        balance_rows(data, ranks)
    assert list(plain.non_tensor_batch["traj_uid"]) != traj_uids
    for key, tensor in plain.batch.items():
        assert packed.batch[key].equal(tensor), key
    for key, column in plain.non_tensor_batch.items():
        assert packed.non_tensor_batch[key].tolist() == column.tolist(), key


def sampled_tokens(data, row: int) -> list[int]:
    return data.batch["responses"][row][data.batch["response_mask"][row].bool()].tolist()


@pytest.mark.parametrize("history", ["append", "window"])
def test_every_trained_token_is_the_sampled_one(generate, tokenizer, history):
    data, (engine,) = generate(make_config(history=history))
    requests = {tuple(request.prompt_ids): request for request in engine.requests}
    prompt_width = data.batch["prompts"].shape[1]
    turns = 0
    for row, steps in enumerate(data.non_tensor_batch["steps"]):
        row_tokens = data.batch["input_ids"][row][data.batch["attention_mask"][row].bool()].tolist()
        for step in steps:
            start, end = step.span
            assert tuple(row_tokens[:start]) in requests, (
                "the row's prefix is the prompt of the request"
            )
            assert tokenizer.decode(row_tokens[start:end]) == step.response
            turns += 1
        padding = prompt_width - int(data.batch["attention_mask"][row][:prompt_width].sum())
        assert data.batch["position_ids"][row][padding] == 0
        assert data.batch["position_ids"][row].max() == len(row_tokens) - 1
        log_probs = data.batch["rollout_log_probs"][row][data.batch["response_mask"][row].bool()]
        expected = [-(1 + i) / 4 for step in steps for i in range(step.num_tokens)]
        assert log_probs.tolist() == expected
    assert turns == len(engine.requests)


def test_walking_policy_reaches_the_target(generate):
    data, _ = generate(make_config(n=3), groups=3)
    columns = data.non_tensor_batch
    assert len(data) == 9 and columns["won"].all() and (columns["episode_rewards"] == 1.0).all()
    assert len(set(columns["uid"])) == 3 and len(set(columns["traj_uid"])) == 9
    lengths = dict(zip(columns["traj_uid"], columns["episode_lengths"], strict=True))
    for steps, traj in zip(columns["steps"], columns["traj_uid"], strict=True):
        assert (
            len(steps) == lengths[traj] and steps[-1].done and not any(s.done for s in steps[:-1])
        )
    metrics = data.meta_info["metrics"]
    assert metrics["episode/success_rate"] == 1.0 and metrics["rollout/aborted"] == 0.0
    assert 0 < metrics["rollout/active_ratio"] <= 1.0
    assert {"alternatives", "gen_engine", "gen_env", "pack"} <= set(data.meta_info["timing"])


def test_append_and_window_give_the_same_actions(generate):
    appended, _ = generate(make_config(history="append"))
    windowed, _ = generate(make_config(history="window", history_length=2))

    def actions(data):
        by_trajectory: dict = {}
        for traj, steps in zip(
            data.non_tensor_batch["traj_uid"], data.non_tensor_batch["steps"], strict=True
        ):
            by_trajectory.setdefault(traj, []).extend((s.step, s.action) for s in steps)
        return by_trajectory

    assert actions(appended) == actions(windowed)
    assert len(windowed) == int(appended.non_tensor_batch["episode_lengths"].sum())
    assert all(len(steps) == 1 for steps in windowed.non_tensor_batch["steps"])


def test_window_prompt_shows_the_last_turns_only(generate):
    config = make_config(history="window", history_length=1, n=1)
    _data, (engine,) = generate(
        config, script=lambda request, prompt: "<action>stay</action>", groups=1
    )
    prompts = [engine.tokenizer.decode(request.prompt_ids) for request in engine.requests]
    assert [prompt.count("You chose: stay") for prompt in prompts[:3]] == [0, 1, 1]
    assert all(prompt.count("<|im_start|>") == 3 for prompt in prompts)


def test_turn_cut_by_length_ends_the_episode_without_env_step(generate):
    actions = []
    original = PoolSession.step

    async def record_action(self, action):
        actions.append(action)
        return await original(self, action)

    PoolSession.step = record_action
    try:
        data, _ = generate(
            make_config(n=1, max_turn_tokens=6), lambda request, prompt: "look " * 40, groups=2
        )
    finally:
        PoolSession.step = original
    assert actions == []
    assert list(data.non_tensor_batch["truncated"]) == ["length", "length"]
    records = data.non_tensor_batch["steps"]
    assert all(
        len(r) == 1 and r[0].stop_reason == "length" and not r[0].is_action_valid for r in records
    )
    assert data.batch["response_mask"].sum(-1).tolist() == [6, 6]


def test_token_budget_is_checked_before_sampling(generate):
    config = make_config(n=1, max_turn_tokens=20)
    config.data.max_response_length = 70
    data, (engine,) = generate(config, lambda request, prompt: "<action>stay</action>", groups=1)
    assert list(data.non_tensor_batch["truncated"]) == ["budget"]
    for request in engine.requests:
        response = len(request.prompt_ids) - len(engine.requests[0].prompt_ids)
        assert response + request.max_tokens <= 70
    assert data.batch["responses"].shape[1] <= 70


def test_prompt_over_the_budget_is_dropped(generate):
    config = make_config(n=1)
    config.data.max_prompt_length = 8
    with pytest.raises(RuntimeError, check=mentions("without_turn")):
        generate(config, groups=1)


def test_step_limit_truncates(generate):
    config = make_config(n=1, max_steps=2, kwargs={"size": 6, "max_steps": 50})
    data, _ = generate(config, lambda request, prompt: "<action>stay</action>", groups=2)
    assert set(data.non_tensor_batch["truncated"]) == {"steps"}
    assert data.non_tensor_batch["episode_lengths"].tolist() == [2, 2]
    assert not data.non_tensor_batch["won"].any()


def make_resets_fail(monkeypatch, count: int = 1):
    original, calls = PoolSession.reset, []

    async def reset(self, task, seed):
        calls.append(seed)
        if len(calls) <= count:
            raise EnvFailure("timeout", "too slow")
        return await original(self, task, seed)

    monkeypatch.setattr(PoolSession, "reset", reset)


@pytest.mark.parametrize(
    ("on_abort", "rows", "whole_group"), [("drop_group", 3, 2.0), ("keep_rest", 5, 0.0)]
)
def test_failed_trajectories_are_handled_by_on_abort(
    generate, monkeypatch, on_abort, rows, whole_group
):
    make_resets_fail(monkeypatch)
    data, _ = generate(make_config(n=3, on_abort=on_abort), groups=2)
    metrics = data.meta_info["metrics"]
    assert len(data) == rows
    assert metrics["rollout/aborted"] == metrics["rollout/aborted_env_timeout"] == 1.0
    assert metrics["rollout/left_out_aborted"] == 1.0
    assert metrics["rollout/left_out_group_of_aborted"] == whole_group
    assert not data.non_tensor_batch["aborted"].any()


def test_validation_counts_failed_trajectories_as_no_success(generate, monkeypatch):
    make_resets_fail(monkeypatch)
    data, _ = generate(make_config(n=1), groups=3, is_train=False)
    assert len(data) == 3
    assert data.non_tensor_batch["aborted"].tolist() == [True, False, False]
    assert data.non_tensor_batch["won"].tolist() == [False, True, True]
    assert data.batch["response_mask"][0].sum() == 0


def test_greedy_loop_generates_each_row_at_temperature_zero(tokenizer):
    config = make_config(n=2)
    config.actor_rollout_ref.rollout.val_kwargs.n = 3
    config.actor_rollout_ref.rollout.val_kwargs.do_sample = True
    group, envs, (engine,) = make_world(tokenizer, config)
    collector = TrajectoryCollector(config, tokenizer)
    data = collector.greedy_loop(envs.gen_batch(1, 2), group, envs)
    collector.close()
    assert len(data) == 4 and {request.temperature for request in engine.requests} == {0.0}


@pytest.mark.parametrize("levels", [False, True])
def test_failed_batch_is_replaced_by_other_tasks(generate, monkeypatch, levels):
    make_resets_fail(monkeypatch, count=4)
    data, _ = generate(make_config(n=2, levels=levels), groups=2)
    metrics, columns = data.meta_info["metrics"], data.non_tensor_batch
    assert metrics["rollout/trajectories"] == 8 and metrics["rollout/aborted"] == 4
    assert (
        set(columns["uid"])
        == {"train-1-1-0", "train-1-1-1"}
        == set(data.meta_info["tasks"].non_tensor_batch["uid"])
    )
    assert not columns["aborted"].any()


@pytest.mark.parametrize("only_differing", [False, True])
def test_price_factor_of_the_trainer_is_that_of_replaced_tasks(
    tokenizer, monkeypatch, only_differing
):
    make_resets_fail(monkeypatch, count=2)
    config = make_config(n=2, levels=True)
    config.algorithm.filter_groups.enable = only_differing
    group, envs, _ = make_world(tokenizer, config, walking_policy(True))
    collector = TrajectoryCollector(config, tokenizer)
    tasks = envs.gen_batch(1, 1)
    tasks.meta_info[PRICE_MULTIPLIER] = 0.25
    data = collector.multi_turn_loop(tasks, group, envs)
    collector.close()
    assert data.meta_info[PRICE_MULTIPLIER] == 0.25
    assert data.meta_info["metrics"]["rollout/aborted"] == 2


def test_environment_that_always_fails_is_an_error(generate, monkeypatch):
    make_resets_fail(monkeypatch, count=99)
    with pytest.raises(RuntimeError, check=mentions("left_out_aborted': 16")):
        generate(make_config(n=2), groups=2)


def test_aborted_request_aborts_only_its_trajectory(generate):
    script, aborted = walking_policy(), []

    def abort_first(request, prompt):
        if not aborted:
            aborted.append(request.request_id)
            return StopReason.ABORT
        return script(request, prompt)

    data, _ = generate(make_config(n=2, on_abort="keep_rest"), abort_first, groups=2)
    assert len(data) == 3 and data.meta_info["metrics"]["rollout/aborted_engine"] == 1.0


def test_different_start_states_in_a_group_are_refused(generate, monkeypatch):
    original, calls = PoolSession.reset, []

    async def reset(self, task, seed):
        calls.append(seed)
        return await original(self, {**task, "start": len(calls) % 5, "target": 6}, seed)

    monkeypatch.setattr(PoolSession, "reset", reset)
    with pytest.raises(GroupMismatch):
        generate(make_config(n=2))


def test_validation_samples_with_val_kwargs(generate):
    config = make_config(n=1)
    config.actor_rollout_ref.rollout.val_kwargs.do_sample = False
    config.actor_rollout_ref.rollout.val_kwargs.n = 2
    data, (engine,) = generate(config, groups=2, is_train=False)
    assert {request.temperature for request in engine.requests} == {0.0}
    assert (
        len(set(data.non_tensor_batch["traj_uid"])) == 4
        and len(set(data.non_tensor_batch["uid"])) == 2
    )


def test_levels_are_parsed_without_rlvcr(generate):
    data, _ = generate(make_config(levels=True, n=1), groups=6)
    levels = [step.level for steps in data.non_tensor_batch["steps"] for step in steps]
    assert set(levels) <= {1, 2, 3, 4} and len(set(levels)) > 1
    assert data.meta_info["metrics"]["rlvcr/thought_tokens_mean"] > 0
    assert "thinking_level_entropies" not in set(data.batch.keys())


def test_trajectory_keeps_its_engine(generate):
    _, engines = generate(make_config(n=2), groups=3, engines=2)
    assert all(engine.requests for engine in engines)
    first_turn = 1  # the instructions contain one example
    for engine in engines:
        earlier_prompts: list[list[int]] = []
        for prompt in (request.prompt_ids for request in engine.requests):
            later_turn = engine.tokenizer.decode(prompt).count("<action>") > first_turn
            assert not later_turn or any(
                prompt[: len(earlier)] == earlier for earlier in earlier_prompts
            )
            earlier_prompts.append(prompt)


def test_dynamic_sampling_generates_until_returns_differ(tokenizer):
    config = make_config(n=2)
    config.algorithm.filter_groups.enable = True
    config.algorithm.filter_groups.max_num_gen_batches = 4
    envs = make_envs(config)[0]
    make_batch, draws = envs.gen_batch, []

    def script(request, prompt):
        """Cut every request of the first batch short, and later every second one."""
        reaches_target = draws and int(request.request_id.rsplit("-", 1)[1]) % 2
        return f"<action>{walk(prompt)}</action>" if reaches_target else "look " * 40

    def gen_batch(step, batch_size, batch_in_step=0):
        draws.append(batch_in_step)
        return make_batch(step, batch_size, batch_in_step)

    envs.gen_batch = gen_batch
    collector = TrajectoryCollector(config, tokenizer)
    batch = make_batch(5, 2)
    batch.meta_info["global_step"] = 5
    try:
        data = collector.multi_turn_loop(batch, Group([ScriptedEngine(tokenizer, script)]), envs)
    finally:
        collector.close()
    assert draws and draws == list(range(1, len(draws) + 1)), (
        "every further batch is another draw of the same step"
    )
    metrics, columns = data.meta_info["metrics"], data.non_tensor_batch
    assert metrics["rollout/gen_batches"] == len(draws) + 1
    assert metrics["rollout/groups_with_spread"] == len(set(columns["uid"])) > 0
    for uid in set(columns["uid"]):
        assert len(set(columns["episode_rewards"][columns["uid"] == uid])) == 2
    # A greedy baseline (ReMax) is generated for these tasks.
    tasks = data.meta_info["tasks"].non_tensor_batch
    assert set(tasks["uid"]) == set(columns["uid"]), "the first batch is not among them"
    task_ids = dict(zip(columns["uid"], columns["task_id"], strict=True))
    assert [task_ids[uid] for uid in tasks["uid"]] == list(tasks["task_id"])
    assert sorted(tasks["member"]) == sorted([0, 1] * len(task_ids))


def test_group_that_will_be_dropped_does_not_count(tokenizer, monkeypatch):
    """Groups of the first batch have different returns, but a failed member: a second batch is
    generated.
    """
    config = make_config(n=4)
    config.algorithm.filter_groups.enable = True
    group, envs, _ = make_world(tokenizer, config)
    collector = TrajectoryCollector(config, tokenizer)
    generate_batch, batches = collector._generate_batch, []

    def generate_with_failures(batch, *args):
        result = generate_batch(batch, *args)
        for _number, trajectory in enumerate(result.trajectories):
            member = int(trajectory.spec.traj_uid.rpartition("/")[2])
            trajectory.reward = float(member % 2)
            trajectory.aborted = "env_dead" if not batches and member == 3 else None
        batches.append(batch)
        return result

    monkeypatch.setattr(collector, "_generate_batch", generate_with_failures)
    batch = envs.gen_batch(1, 2)
    batch.meta_info["global_step"] = 1
    try:
        data = collector.multi_turn_loop(batch, group, envs)
    finally:
        collector.close()
    assert len(batches) == 2 and data.meta_info["metrics"]["rollout/left_out_aborted"] == 2
    assert set(data.non_tensor_batch["uid"]) == set(batches[1].non_tensor_batch["uid"])


def test_differing_groups_are_selected_up_to_the_limit():
    def trajectory(uid, member, reward):
        return Trajectory(RolloutSpec(0, {}, uid, f"{uid}/{member}", 0), reward=reward)

    trajectories = [
        *(trajectory("flat", m, 1.0) for m in range(2)),
        *(trajectory("a", m, float(m)) for m in range(2)),
        *(trajectory("b", m, float(m)) for m in range(2)),
    ]
    assert [
        [t.spec.uid for t in group]
        for group in select_groups_with_differing_returns(trajectories, 1)
    ] == [["a", "a"]]
    assert len(select_groups_with_differing_returns(trajectories, 9)) == 2
    assert select_groups_with_differing_returns(trajectories, 0) == []


def test_shards_hold_whole_groups():
    specs = make_rollout_specs(make_envs(make_config(n=3))[0].gen_batch(1, 5))
    shards = shard_by_group(specs, 2)
    uids = [{spec.uid for spec in shard} for shard in shards]
    assert not uids[0] & uids[1] and [len(shard) for shard in shards] == [9, 6]
    assert [spec.index for spec in specs] == list(range(15))


def test_template_that_drops_turns_is_refused():
    forgetful = make_tiny_tokenizer()
    forgetful.chat_template = forgetful.chat_template.replace(
        "in messages -%}", "in messages[-1:] -%}"
    )
    with pytest.raises(UnsupportedTemplateError, check=mentions("env.history=window")):
        TrajectoryCollector(make_config(), forgetful)
    TrajectoryCollector(make_config(history="window"), forgetful)


def test_chat_template_arguments_apply_to_every_prompt():
    open_ended = make_tiny_tokenizer()
    open_ended.chat_template = open_ended.chat_template.replace(
        "assistant\\n' }}", "assistant\\n' + mood }}"
    )
    config = make_config(history="window", n=1)
    config.data.apply_chat_template_kwargs = {"mood": "gladly "}
    group, envs, (engine,) = make_world(open_ended, config)
    collector = TrajectoryCollector(config, open_ended)
    collector.multi_turn_loop(envs.gen_batch(1, 1), group, envs)
    collector.close()
    prompts = [open_ended.decode(request.prompt_ids) for request in engine.requests]
    assert len(prompts) > 1 and all(prompt.endswith("assistant\ngladly ") for prompt in prompts)


def test_environment_without_level_prompt_is_refused(tokenizer, monkeypatch):
    config = make_config(levels=True)
    group, envs, _ = make_world(tokenizer, config)
    monkeypatch.setattr(NumberLinePrompts, "asks_for_levels", False)
    with pytest.raises(ValueError, check=mentions("env.levels")):
        TrajectoryCollector(config, tokenizer).multi_turn_loop(envs.gen_batch(1, 1), group, envs)


# ---- engine client ------------------------------------------------------------------------------


def sample_many(engine, count: int, timeout_s: float = 5.0, **options) -> list[Any]:
    async def run():
        client = EngineClient([engine], "me")
        try:
            requests = [client.sample([1, 2, i], max_tokens=8, **options) for i in range(count)]
            return await asyncio.gather(*requests, return_exceptions=True)
        finally:
            await client.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agent_system.multi_turn_rollout.engine_client.REQUEST_TIMEOUT_S", timeout_s)
        return asyncio.run(run())


def test_simultaneous_requests_share_a_message_and_a_poll(tokenizer):
    engine = ScriptedEngine(
        tokenizer, lambda request, prompt: [request.prompt_ids[-1]], delay_s=0.01
    )
    results = sample_many(engine, 20)
    assert [result.token_ids for result in results] == [[i] for i in range(20)]
    assert engine.submits == [20] and engine.most_polls == 1


class DeadEngine(ScriptedEngine):
    async def poll(self, client):
        raise ConnectionError("gone")


def test_dead_engine_fails_every_request(tokenizer):
    results = sample_many(DeadEngine(tokenizer, lambda request, prompt: "look"), 3)
    assert all(
        isinstance(result, RolloutWorkerFailed) and "gone" in str(result) for result in results
    )


class SlowEngine(ScriptedEngine):
    """Engine that has no result for the first polls."""

    empty_polls = 30

    async def poll(self, client):
        if self.empty_polls:
            self.empty_polls -= 1
            await asyncio.sleep(0.01)
            return []
        return await super().poll(client)


def test_slow_requests_are_not_aborted(tokenizer):
    engine = SlowEngine(tokenizer, lambda request, prompt: "look")
    results = sample_many(engine, 2, timeout_s=0.1)
    assert all(isinstance(result, SamplingResult) for result in results)


class HangingEngine(ScriptedEngine):
    async def poll(self, client):
        await asyncio.sleep(5)
        return []


def test_worker_that_does_not_answer_fails_every_request(tokenizer):
    results = sample_many(HangingEngine(tokenizer, lambda request, prompt: ""), 2, timeout_s=0.05)
    assert all(isinstance(result, RolloutWorkerFailed) for result in results)


def test_engine_failure_ends_the_run(tokenizer):
    config = make_config()
    envs = make_envs(config)[0]
    collector = TrajectoryCollector(config, tokenizer)
    with pytest.raises(RolloutWorkerFailed, match="gone"):
        collector.multi_turn_loop(
            envs.gen_batch(1, 2), Group([DeadEngine(tokenizer, walking_policy())]), envs
        )
    collector.close()


@pytest.mark.parametrize("history", ["append", "window"])
def test_reward_model_gets_the_last_conversation_of_an_episode(generate, history):
    config = make_config(history=history, history_length=2)
    config.reward_model.enable = True
    data, _ = generate(config)
    columns = data.non_tensor_batch
    last = {traj: row for row, traj in enumerate(columns["traj_uid"])}
    for row, messages in enumerate(columns["messages"]):
        if last[columns["traj_uid"][row]] != row:
            assert messages == []
            continue
        steps = columns["steps"][row]
        roles = [message["role"] for message in messages]
        assert roles == ["system", *["user", "assistant"] * len(steps)]
        replies = [message["content"] for message in messages if message["role"] == "assistant"]
        assert replies == [step.response for step in steps] and steps[-1].done
        observations = [message["content"] for message in messages if message["role"] == "user"]
        assert all(step.observation in text for step, text in zip(steps, observations, strict=True))


@pytest.mark.parametrize("history", ["append", "window"])
def test_reward_model_gets_observations_without_cut_marks(history):
    """Added tokens in observations are broken up for the policy, but not for the reward model."""
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_tokens(["target is"])
    config = make_config(history=history, history_length=2)
    config.reward_model.enable = True
    group, envs, _ = make_world(tokenizer, config, walking_policy())
    collector = TrajectoryCollector(config, tokenizer)
    try:
        data = collector.multi_turn_loop(envs.gen_batch(1, 2), group, envs)
    finally:
        collector.close()
    conversations = [messages for messages in data.non_tensor_batch["messages"] if messages]
    for message in (message for messages in conversations for message in messages):
        assert TOKEN_SPLIT_CHARACTER not in message["content"]
        assert message["role"] != "user" or "target is" in message["content"]
