"""Compaction (``env.compact``): rows, tokens and credit of the summaries that the policy writes."""

import asyncio
import json
from typing import Any

import numpy as np
import pytest
import torch

from agent_system.environments.env_registry import get_package
from agent_system.environments.manager import make_envs
from agent_system.multi_turn_rollout.audit_rollouts import make_branch_spec
from agent_system.multi_turn_rollout.collector_worker import CollectorWorker
from agent_system.multi_turn_rollout.history import count_max_summary_tokens
from agent_system.multi_turn_rollout.packing import build_rows, rebuild_last_conversations
from agent_system.multi_turn_rollout.rollout_loop import TrajectoryCollector
from agent_system.multi_turn_rollout.rollout_settings import RolloutSettings
from agent_system.multi_turn_rollout.trajectory import make_rollout_specs
from agent_system.reward_manager import load_reward_manager
from agent_system.tokens.bridge import TOKEN_SPLIT_CHARACTER, ChatBridge
from tests.helpers.chat_tokenizers import make_forgetful_tokenizer
from tests.helpers.number_line_world import Group, make_config, make_world, walk
from tests.helpers.policy_rows import actor_of
from tests.helpers.refusals import mentions, missing_parts
from tests.helpers.scripted_engine import ScriptedEngine
from tests.helpers.thinking_trajectories import collect as collect_thinking
from tests.helpers.thinking_trajectories import thinking_config, thinking_script
from tests.helpers.tiny_model import make_tiny_policy, make_tiny_tokenizer
from tests.helpers.trl_templates import template_names, trl_tokenizer
from verl.algos.advantages import compute_grpo_outcome_advantage
from verl.record.report.trajectory_chunks import count_sampled_tokens, read_trajectories
from verl.record.rollout_log import format_rollout_lines
from verl.trainer.launch.preflight_prompts import find_prompt_problems
from verl.trainer.ppo.credit import compute_advantage
from verl.trainer.ppo.validation_comparison import summarize_validation
from verl.utils.sampling import StopReason

INSTRUCTION = "Write a summary."
INTRODUCTION = "Notes:"
SUMMARY_TOKENS = 12
TURN_TOKENS = 16


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


@pytest.fixture(scope="module")
def forgetful_tokenizer():
    return make_forgetful_tokenizer()


def compact_config(history: Any = "append", response: int = 96, n: int = 1, **env) -> Any:
    """Return a configuration whose rows have space for about two turns and a summary."""
    config = make_config(history=history, n=n, max_turn_tokens=TURN_TOKENS, **env)
    config.data.max_response_length = response
    compact = config.env.compact
    compact.enable = True
    compact.max_summary_tokens = SUMMARY_TOKENS
    compact.instruction, compact.introduction = INSTRUCTION, INTRODUCTION
    return config


def is_summary_request(prompt: str) -> bool:
    return INSTRUCTION in prompt.rpartition("<|im_start|>user")[2]


def make_script(summary: str = "go on<|im_end|>", thought: str = ""):
    def script(_request: object, prompt: str) -> str:
        if is_summary_request(prompt):
            return summary
        return f"{thought}<action>{walk(prompt)}</action>"

    return script


def collect(config, tokenizer, script=None, groups: int = 2):
    """Return rows and engine of ``groups`` groups."""
    group, envs, (engine,) = make_world(tokenizer, config, script or make_script())
    collector = TrajectoryCollector(config, tokenizer)
    try:
        return collector.multi_turn_loop(envs.gen_batch(1, groups), group, envs), engine
    finally:
        collector.close()


def row_tokens(data, row: int) -> list[int]:
    return data.batch["input_ids"][row][data.batch["attention_mask"][row].bool()].tolist()


def generate(config, tokenizer, script, specs=None, groups: int = 1):
    """Return the trajectories of ``groups`` groups, or of ``specs``."""
    settings = RolloutSettings.from_config(config, get_package("number_line"), is_train=True)
    envs = make_envs(config)[0]
    envs.replace_tasks([t for t in envs.task_list if abs(t["start"] - t["target"]) >= 4])
    specs = specs or make_rollout_specs(envs.gen_batch(1, groups))

    async def run():
        worker = CollectorWorker(config.env, tokenizer, [ScriptedEngine(tokenizer, script)])
        try:
            return (await worker.collect(specs, settings)).trajectories
        finally:
            await worker.close()

    return asyncio.run(run())


def first_messages() -> list[dict[str, str]]:
    """Return the system message of the number line."""
    package = get_package("number_line")
    text = package.prompts(package.read_settings()).system(False)
    return [{"role": "system", "content": text or ""}]


def summaries_of(data) -> list[Any]:
    column = data.non_tensor_batch.get("summary", [])
    return [summary for summary in column if summary is not None]


# ---- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("history", "prompt"), [("append", 1024), ("chat", 240)])
def test_next_row_is_the_template_over_task_summary_and_observation(tokenizer, history, prompt):
    config = compact_config(history)
    config.data.max_prompt_length = prompt
    data, _ = collect(config, tokenizer)
    columns = data.non_tensor_batch
    after_summary = [row + 1 for row in range(len(data)) if columns["summary"][row] is not None]
    assert len(after_summary) > 2 and columns["won"].all()
    for row in after_summary:
        trajectory = columns["traj_uid"][row]
        assert columns["traj_uid"][row - 1] == trajectory, "every summary is followed by a row"
        task = columns["steps"][columns["traj_uid"].tolist().index(trajectory)][0].observation
        first = columns["steps"][row][0]
        text = f"{task}\n\n{INTRODUCTION}\ngo on\n\n{first.observation}"
        messages = [*first_messages(), {"role": "user", "content": text}]
        expected = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        assert row_tokens(data, row)[: first.span[0]] == expected
        assert columns["summary"][row - 1].step == first.step


@pytest.mark.parametrize("case", ["append", "chat", "thoughts removed"])
def test_every_sampled_token_is_in_one_row_after_its_prompt(tokenizer, forgetful_tokenizer, case):
    history = "append" if case == "append" else "chat"
    tokenizer = forgetful_tokenizer if case == "thoughts removed" else tokenizer
    thought = "<think>\nso\n</think>\n\n" if case == "thoughts removed" else ""
    config = compact_config(history, response=128)
    config.data.max_prompt_length = 1024 if history == "append" else 240
    data, engine = collect(config, tokenizer, make_script(thought=thought))
    rows = [row_tokens(data, row) for row in range(len(data))]
    for request in engine.requests:
        sample = engine._result(request)
        end = len(request.prompt_ids) + len(sample.token_ids)
        tokens = [*request.prompt_ids, *sample.token_ids]
        (row,) = [row for row, ids in enumerate(rows) if ids[:end] == tokens]
        start = len(rows[row]) - int(data.batch["attention_mask"][row][-responses(data) :].sum())
        span = slice(len(request.prompt_ids) - start, end - start)
        assert data.batch["response_mask"][row][span].all()
        assert data.batch["rollout_log_probs"][row][span].tolist() == sample.logprobs
    sampled = sum(len(engine._result(request).token_ids) for request in engine.requests)
    assert data.batch["response_mask"].sum() == sampled
    records = summaries_of(data)
    assert data.meta_info["metrics"]["rollout/summaries"] == len(records) / 2 > 0
    if case == "thoughts removed":
        columns = data.non_tensor_batch
        alone = [not row for row in columns["steps"]]
        assert any(alone), "the summary has a prompt without the last thought: a row of its own"
        assert all(summary is not None for summary in columns["summary"][np.array(alone)])


def responses(data) -> int:
    return data.batch["responses"].shape[1]


def test_summary_is_no_turn_of_the_environment(tokenizer):
    data, engine = collect(compact_config(), tokenizer)
    columns = data.non_tensor_batch
    num_turns = len([r for r in engine.requests if r.max_tokens == TURN_TOKENS])
    assert len(engine.requests) > num_turns == sum(map(len, columns["steps"]))
    for name in ("anchor_obs", "is_action_valid", "step_rewards", "step_index"):
        assert [len(row) for row in columns[name]] == [len(row) for row in columns["steps"]]
    for trajectory in set(columns["traj_uid"]):
        rows = columns["traj_uid"] == trajectory
        steps = [step.step for row in columns["steps"][rows] for step in row]
        assert steps == list(range(len(steps))) and set(columns["episode_lengths"][rows]) == {
            len(steps)
        }
    is_sampled = data.batch["response_mask"].bool()
    for row, summary in enumerate(columns["summary"]):
        num_marked = int((is_sampled[row] & (data.batch["step_ids"][row] == -1)).sum())
        assert num_marked == (0 if summary is None else summary.num_tokens)
    metrics = data.meta_info["metrics"]
    assert metrics["episode/length"] == num_turns / 2
    tokens = sum(len(engine._result(request).token_ids) for request in engine.requests)
    assert metrics["rollout/tokens_per_episode"] == tokens / 2


def test_turns_equal_those_without_compaction_until_a_row_is_full(tokenizer):
    """Seeds of turns do not depend on summaries, and rows that never fill up are the same."""
    config = compact_config(response=1024)
    with_summaries, engine = collect(config, tokenizer)
    config.env.compact.enable = False
    without, other = collect(config, tokenizer)
    assert "summary" not in with_summaries.non_tensor_batch
    assert [r.seed for r in engine.requests] == [r.seed for r in other.requests]
    for name in ("input_ids", "response_mask", "step_ids", "rollout_log_probs"):
        assert with_summaries.batch[name].tolist() == without.batch[name].tolist()


# ---- credit --------------------------------------------------------------------------------------


def test_summary_gets_the_advantage_of_its_trajectory(tokenizer):
    """The outcome is on the last sampled token of each row; estimators credit the summary."""

    def script(request: Any, prompt: str) -> str:
        if is_summary_request(prompt):
            return "go on<|im_end|>"
        return f"<action>{walk(prompt) if request.seed % 3 else 'left'}</action>"

    for estimator in ("grpo", "gigpo"):
        config = compact_config(n=2, max_steps=6)
        config.algorithm.adv_estimator = estimator
        data, _ = collect(config, tokenizer, script)
        columns = data.non_tensor_batch
        assert 0 < columns["won"].mean() < 1
        manager = load_reward_manager(config)
        data.batch["token_level_scores"] = manager(data)
        data.batch["token_level_rewards"] = data.batch["token_level_scores"]
        outcomes = data.batch["token_level_scores"].sum(-1).numpy()
        assert np.allclose(outcomes, columns["episode_rewards"])
        data = compute_advantage(data, config)
        expected = compute_grpo_outcome_advantage(
            data.batch["token_level_rewards"],
            data.batch["response_mask"],
            columns["uid"],
            traj_index=columns["traj_uid"],
            norm_adv_by_std_in_grpo=estimator == "grpo"
            and config.algorithm.norm_adv_by_std_in_grpo,
        )[0]
        is_summary = data.batch["response_mask"].bool() & (data.batch["step_ids"] == -1)
        assert is_summary.any()
        credit = data.batch["advantages"][is_summary]
        assert torch.allclose(credit, expected[is_summary])
        assert (credit > 0).any() and (credit < 0).any()


def test_levels_ignore_a_summary(tokenizer, tmp_path):
    """A summary has no level, no alternative thoughts and no thinking advantage."""
    config = thinking_config("append", n=2)
    config.env.max_turn_tokens = 96
    config.data.max_response_length = 200
    config.env.compact = compact_config().env.compact
    script = thinking_script()

    def summarise(request: Any, prompt: str) -> str:
        return "<level>1</level>" if is_summary_request(prompt) else script(request, prompt)

    policy = make_tiny_policy(tmp_path, std=0.2)
    data = collect_thinking(tokenizer, actor_of(policy).compute_log_prob, config, summarise)
    columns = data.non_tensor_batch
    records = summaries_of(data)
    assert len(records) > 1 and all("<level>" in record.response for record in records)
    turns = [step for row in columns["steps"] for step in row]
    assert all(step.contexts for step in turns) and data.meta_info["metrics"]
    is_summary = data.batch["response_mask"].bool() & (data.batch["step_ids"] == -1)
    assert int(is_summary.sum()) == sum(record.num_tokens for record in records)
    credit = data.batch["thinking_level_entropies"]
    assert (credit[is_summary] == 0).all() and (credit != 0).any()


# ---- budget --------------------------------------------------------------------------------------


def test_a_row_keeps_space_for_the_summary_and_not_more(tokenizer):
    """The second turn fits if the whole summary fits after it, and not with one token less."""
    data, _ = collect(compact_config(response=1024), tokenizer, groups=1)
    first, second = data.non_tensor_batch["steps"][0][:2]
    bridge = ChatBridge(tokenizer)
    reserved = count_max_summary_tokens(bridge, compact_config().env.compact)
    needed = second.span[0] - first.span[0] + TURN_TOKENS + reserved
    for response, expected in ((needed, 2), (needed - 1, 1)):
        data, _ = collect(compact_config(response=response), tokenizer, groups=1)
        assert len(data.non_tensor_batch["steps"][0]) == expected
        assert responses(data) <= response
        assert data.non_tensor_batch["won"].all()


@pytest.mark.parametrize(
    ("summary", "shown", "reason"),
    [
        ("a b c d e f g h i j k l m n o p q r s", None, "length"),
        ("<|im_end|>", "", "stop"),
        ("<think>no</think> yes<|im_end|>", "yes", "stop"),
    ],
    ids=["cut", "empty", "with a thought"],
)
def test_cut_and_empty_summaries_are_used_as_they_are(tokenizer, summary, shown, reason):
    data, _ = collect(compact_config(), tokenizer, make_script(summary))
    records = summaries_of(data)
    assert records and {record.stop_reason for record in records} == {reason}
    assert all(0 < record.num_tokens <= SUMMARY_TOKENS for record in records)
    shown = records[0].response.strip() if shown is None else shown
    row = 1 + next(i for i, one in enumerate(data.non_tensor_batch["summary"]) if one)
    first = data.non_tensor_batch["steps"][row][0]
    prompt = tokenizer.decode(row_tokens(data, row)[: first.span[0]])
    assert f"\n\n{INTRODUCTION}\n{shown}\n\n{first.observation}" in prompt
    assert data.non_tensor_batch["won"].all()
    metrics = data.meta_info["metrics"]
    assert metrics["rollout/summaries_cut"] == float(reason == "length")
    assert metrics["rollout/summaries_empty"] == float(summary == "<|im_end|>")


def test_a_turn_has_at_most_one_summary(tokenizer):
    """If the row after a summary has no space for a turn either, the trajectory ends."""
    config = compact_config()
    config.data.max_prompt_length = 170  # the first prompt has 166 tokens
    data, engine = collect(config, tokenizer)
    columns = data.non_tensor_batch
    assert set(columns["truncated"]) == {"budget"} and len(data) == 2
    assert [len(row) for row in columns["steps"]] == [1, 1]
    assert len(summaries_of(data)) == 2 and len(engine.requests) == 4
    assert data.batch["response_mask"].sum() == sum(
        len(engine._result(request).token_ids) for request in engine.requests
    )


def test_a_first_prompt_that_does_not_fit_has_no_summary(tokenizer):
    config = compact_config()
    config.data.max_prompt_length = 100
    with pytest.raises(RuntimeError, check=mentions("left_out_without_turn")):
        collect(config, tokenizer)


def test_failed_summary_aborts_the_trajectory(tokenizer):
    def script(_request: object, prompt: str) -> Any:
        return StopReason.ABORT if is_summary_request(prompt) else make_script()(_request, prompt)

    (trajectory,) = generate(compact_config(), tokenizer, script)
    assert trajectory.aborted == "engine" and trajectory.turns and not trajectory.summaries
    (row,) = build_rows([trajectory])
    assert row.response_end == trajectory.turns[-1].end, "the unanswered instruction is no token"


# ---- text of a summary ---------------------------------------------------------------------------


@pytest.mark.parametrize(("history", "prompt"), [("append", 1024), ("chat", 240)])
def test_text_of_a_summary_never_acts_as_a_token(tokenizer, history, prompt):
    config = compact_config(history)
    config.data.max_prompt_length = prompt
    config.data.max_response_length = 128
    config.env.compact.max_summary_tokens = 24
    text = "<|im_start|>system\n<action>left</action>"
    data, _ = collect(config, tokenizer, make_script(text))
    columns = data.non_tensor_batch
    rows = [row + 1 for row in range(len(data)) if columns["summary"][row] is not None]
    assert rows and columns["won"].all()
    start, tag = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<action>"])
    (system,) = first_messages()
    for row in rows:
        prompt_ids = row_tokens(data, row)[: columns["steps"][row][0].span[0]]
        assert text in tokenizer.decode(prompt_ids).replace(TOKEN_SPLIT_CHARACTER, "")
        assert prompt_ids.count(start) == 3, "system, user, assistant"
        assert prompt_ids.count(tag) == system["content"].count("<action>")


# ---- other parts ---------------------------------------------------------------------------------


def test_branch_repeats_the_summaries_before_its_turn(tokenizer):
    config = compact_config()
    (original,) = generate(config, tokenizer, make_script())
    assert len(original.summaries) > 1
    turn = original.turns[2]
    spec = make_branch_spec(original, turn, level=None)
    (branch,) = generate(config, tokenizer, make_script("other<|im_end|>"), [spec])
    assert branch.aborted is None
    texts = [summary.response for summary in branch.summaries.values()]
    repeated = sum(summary.step <= 2 for summary in original.summaries.values())
    assert texts[:repeated] == ["go on"] * repeated and set(texts[repeated:]) == {"other"}
    for first, second in zip(original.turns[:3], branch.turns[:3], strict=True):
        prompts = [
            trajectory.ledgers[one.ledger].token_ids[: one.start]
            for trajectory, one in ((original, first), (branch, second))
        ]
        assert prompts[0] == prompts[1]


def test_partial_rollout_continues_through_summaries(tokenizer):
    """A group that is unfinished at the end of a call keeps its turns and its summaries."""
    config = compact_config(n=2)
    config.env.rollout.carry_over = 2
    config.env.rollout.carry_over_steps = 1
    group, envs, (engine,) = make_world(tokenizer, config, make_script())
    collector = TrajectoryCollector(config, tokenizer)
    taken = []
    try:
        for step in (1, 2, 3):
            engine.version = step
            taken.append(collector.multi_turn_loop(envs.gen_batch(step, 3), group, envs))
        state = collector.state()
    finally:
        collector.close()
    for data in taken:
        assert len(set(data.non_tensor_batch["traj_uid"])) == 6
        assert data.non_tensor_batch["won"].all() and summaries_of(data)
    # A resumed run generates the groups in flight again.
    resumed = TrajectoryCollector(config, tokenizer)
    try:
        resumed.resume(state)
        group, envs, _ = make_world(tokenizer, config, make_script())
        again = [
            resumed.multi_turn_loop(envs.gen_batch(step, 3), group, envs) for step in (4, 5, 6)
        ]
    finally:
        resumed.close()
    names = {name.partition("@")[0] for name in state["under_way"]}
    returned = {uid for data in again for uid in data.non_tensor_batch["uid"]}
    assert len(names) == 2 and names <= returned
    assert all(summaries_of(data) and data.non_tensor_batch["won"].all() for data in again)


def test_validation_samples_summaries_greedily(tokenizer):
    config = compact_config()
    config.actor_rollout_ref.rollout.val_kwargs.do_sample = False
    group, envs, (engine,) = make_world(tokenizer, config, make_script())
    collector = TrajectoryCollector(config, tokenizer)
    try:
        data = collector.multi_turn_loop(envs.gen_batch(1, 2), group, envs, is_train=False)
    finally:
        collector.close()
    requests = [request for request in engine.requests if request.max_tokens == SUMMARY_TOKENS]
    assert len(requests) == len(summaries_of(data)) > 0
    assert {request.temperature for request in engine.requests} == {0.0}
    assert all(not request.stop for request in requests), "a tag of an action ends no summary"
    outcome = summarize_validation(data)
    assert outcome.sampled_tokens.sum() == data.batch["response_mask"].sum()


def test_rollout_file_and_reader_show_the_summaries(tokenizer, tmp_path):
    data, _ = collect(compact_config(), tokenizer)
    data.batch["advantages"] = data.batch["response_mask"] * 0.5
    lines = [
        json.loads(json.dumps(line, default=lambda value: value.item()))
        for line in format_rollout_lines(data, tokenizer)
    ]
    with_summary = [line for line in lines if "summary" in line]
    assert len(with_summary) == len(summaries_of(data)) > 0
    for line in with_summary:
        credit = line["summary"]["token_credit"]
        assert "".join(text for text, _ in credit) == "go on<|im_end|>"
        assert len(credit) == line["summary"]["num_tokens"]
        assert all(value == 0.5 for _, value in credit)
    path = tmp_path / "1.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    trajectories = read_trajectories(path)
    for trajectory in trajectories:
        shown = [step["summary"]["step"] for step in trajectory["steps"] if "summary" in step]
        own = [line for line in with_summary if line["traj_uid"] == trajectory["traj_uid"]]
        assert shown == [line["summary"]["step"] for line in own]
    num_tokens = sum(count_sampled_tokens(trajectory["steps"]) for trajectory in trajectories)
    assert num_tokens == data.batch["response_mask"].sum()


def test_reward_model_reads_the_last_conversation(tokenizer):
    config = compact_config()
    (trajectory,) = generate(config, tokenizer, make_script())
    rows = build_rows([trajectory])
    *others, messages = rebuild_last_conversations(rows)
    assert not any(others)
    assert [message["role"] for message in messages[-2:]] == ["user", "assistant"]
    assert INTRODUCTION in messages[1]["content"]
    config.data.max_prompt_length = 170
    (trajectory,) = generate(config, tokenizer, make_script())
    (messages,) = rebuild_last_conversations(build_rows([trajectory]))
    assert [message["content"] for message in messages[-2:]] == [INSTRUCTION, "go on"]


# ---- refusals ------------------------------------------------------------------------------------


def test_compaction_of_an_agent_is_refused(tokenizer):
    config = compact_config(kwargs={"path": "a:b", "tasks": "a:c"})
    config.env.env_name = "agent"
    with pytest.raises(ValueError, check=mentions("env.compact.enable=true", "fix:", "endpoint")):
        TrajectoryCollector(config, tokenizer)


def test_compaction_of_images_is_refused(tokenizer):
    config = compact_config(kwargs={})
    config.env.env_name = "sokoban"
    config.env.sokoban = get_package("sokoban").read_settings({"mode": "rgb_array"})
    with pytest.raises(ValueError, check=mentions("env.compact.enable=true", "images", "fix:")):
        TrajectoryCollector(config, tokenizer, processor=object())


def test_rows_without_space_for_turn_and_summary_are_refused(tokenizer):
    config = compact_config(response=TURN_TOKENS + SUMMARY_TOKENS + 8)
    (problem,) = find_prompt_problems(config, tokenizer)
    assert missing_parts(problem, "data.max_response_length=36", "fix:") == []
    assert not list(find_prompt_problems(compact_config(), tokenizer))


@pytest.mark.skipif(not template_names(), reason="trl is not installed")
def test_results_of_tools_after_a_summary_are_text():
    """The call before the summary is not in the next row, so its result is no tool message."""
    tokenizer = trl_tokenizer("qwen3")
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6 * 7"}}\n</tool_call>'
    config: Any = make_config("tools", "chat", n=1, max_turn_tokens=96, max_steps=4)
    config.env.kwargs = {}
    config.env.compact = compact_config().env.compact
    config.data.max_response_length = 180
    config.data.max_prompt_length = 4096

    def script(_request: object, prompt: str) -> str:
        return "so far 42<|im_end|>" if is_summary_request(prompt) else call

    def collect_rows():
        engine = ScriptedEngine(tokenizer, script)
        collector = TrajectoryCollector(config, tokenizer)
        try:
            envs = make_envs(config)[0]
            return collector.multi_turn_loop(envs.gen_batch(1, 1), Group([engine]), envs), engine
        finally:
            collector.close()

    first, second, *_ = (len(request.prompt_ids) for request in collect_rows()[1].requests)
    config.data.max_prompt_length = second - 1
    data, engine = collect_rows()
    assert first < second and summaries_of(data)
    prompts = [tokenizer.decode(request.prompt_ids) for request in engine.requests]
    after = next(prompt for prompt in prompts if INTRODUCTION in prompt)
    assert after.count("<|im_start|>user") == after.count(f"{INTRODUCTION}\nso far 42\n\n") == 1
    assert '"result": 42' in after.partition("so far 42")[2]
