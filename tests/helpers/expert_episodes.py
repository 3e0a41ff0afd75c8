"""Episodes of experts in their environments, turn by turn."""

import random
from dataclasses import dataclass
from typing import Any

from agent_system.environments.env import Env, Observation, Task
from agent_system.environments.expert_protocol import Decision, EpisodeStart, Noise
from agent_system.environments.package import EnvPackage
from agent_system.environments.settings import EnvSettings


@dataclass(frozen=True, slots=True)
class ExpertTurn:
    """Turn of an expert: the observation before its decision, and ``done`` and ``info`` after."""

    observation: Observation
    decision: Decision
    done: bool
    info: dict[str, Any]


def run_expert(
    package: EnvPackage[Any],
    env: Env,
    settings: EnvSettings,
    task: Task,
    noise: Noise | None = None,
    seed: int = 0,
    max_turns: int = 60,
) -> list[ExpertTurn]:
    """Return the turns of one episode, which ends when it is done or has ``max_turns`` turns."""
    assert package.expert is not None
    observation = env.reset(task, 0)
    start = EpisodeStart(settings, task, observation, random.Random(seed), noise or Noise())
    expert = package.expert.start(start)
    turns: list[ExpertTurn] = []
    while not (turns and turns[-1].done) and len(turns) < max_turns:
        decision = expert.act()
        next_observation, _, done, info = env.step(decision.action)
        turns.append(ExpertTurn(observation, decision, done, info))
        observation = next_observation
        if not done:
            expert.observe(decision.action, observation)
    return turns
