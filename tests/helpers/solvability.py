"""Runs scripted policies through the real collector to check that an environment can be solved.

    policy = lambda task: follow_script(shortest_path(task["map"]))
    data = collect_successes("frozen_lake", policy, slippery=False)

Each trajectory has its own scripted engine, so a policy is a function of the task: ``policy(task)``
returns ``act(prompt) -> action``, which is called once per turn with the whole prompt as text.
"""

from collections.abc import Callable, Iterable
from typing import Any

from agent_system.environments.env import Task
from agent_system.environments.manager import make_envs
from agent_system.multi_turn_rollout.rollout_loop import TrajectoryCollector
from tests.helpers.number_line_world import Group, make_config
from tests.helpers.scripted_engine import ScriptedEngine
from tests.helpers.tiny_model import make_tiny_tokenizer
from verl.names import History
from verl.protocol import DataProto

Act = Callable[[str], str]
Policy = Callable[[Task], Act]
PROMPT_TOKENS = 8192
RESPONSE_TOKENS = 32768


def follow_script(actions: Iterable[str]) -> Act:
    """Return an ``act`` that says ``actions`` one after another and ignores the prompts."""
    left = iter(actions)
    return lambda prompt: next(left)


def play_episodes(
    env_name: str,
    policy: Policy,
    *,
    groups: int = 2,
    n: int = 2,
    history: History = "append",
    levels: bool = False,
    split: str = "train",
    max_steps: int = 40,
    processor: Any = None,
    **section: Any,
) -> DataProto:
    """Return the rows of ``n`` trajectories of ``policy`` for ``groups`` tasks of ``split``.

    ``section`` is the section of the environment.
    """
    config = make_config(
        env_name, history, n, levels, kwargs=section, max_steps=max_steps, max_turn_tokens=256
    )
    config.env.num_workers = 1
    config.env.envs_per_worker = groups * n
    config.data.max_prompt_length = PROMPT_TOKENS
    config.data.max_response_length = RESPONSE_TOKENS
    tokenizer = make_tiny_tokenizer()
    train, val = make_envs(config)
    envs = {"train": train, "val": val}[split]
    batch = envs.gen_batch(1, groups)
    engines = [
        ScriptedEngine(tokenizer, _speak(policy(task), levels))
        for task in batch.non_tensor_batch["task"]
    ]
    collector = TrajectoryCollector(config, tokenizer, processor)
    try:
        return collector.multi_turn_loop(batch, Group(engines), envs)
    finally:
        collector.close()


def collect_successes(env_name: str, policy: Policy, **settings: Any) -> DataProto:
    """Run ``play_episodes`` and assert that all trajectories are successes with valid actions
    only.
    """
    data = play_episodes(env_name, policy, **settings)
    columns = data.non_tensor_batch
    lost = [
        [(step.observation, step.action) for step in steps]
        for steps, won in zip(columns["steps"], columns["won"], strict=True)
        if not won
    ]
    assert not lost, f"{len(lost)} of {len(data)} rows were not won; the first: {lost[0]}"
    assert all(all(valid) for valid in columns["is_action_valid"])
    assert data.meta_info["metrics"]["rollout/aborted"] == 0.0
    assert data.meta_info["metrics"]["episode/success_rate"] == 1.0
    return data


def _speak(act: Act, levels: bool) -> Callable:
    """Return a script for ``ScriptedEngine`` with the policy's actions in tags.

    If levels are required, it thinks at level 2.
    """
    head = "<level>2</level><think>as planned</think>" if levels else "<think>as planned</think>"
    return lambda request, prompt: f"{head}<action>{act(prompt)}</action>"
