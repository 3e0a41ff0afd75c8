"""Cold-start data: expert episodes whose steps carry the four thinking levels in balance.

One JSONL line per won episode, on training floor plans only, with games of its own (split ``demo``)::

    {"task_id": str, "data_source": str, "kind": str, "levels": [int | None, ...], "slack": [bool, ...],
     "slips": [bool, ...],
     "messages": [{"role": "user" | "assistant" | "system", "content": str}, ...]}

The user messages are what the package's prompts say in a rollout with ``append`` history and levels
asked for; the assistant messages have exactly the rollout's form, such as
``<level>2</level><think>need mug.</think><action>look</action>``. Level 1 thinks nothing, 2 notes
the situation, 3 adds what was tried, 4 adds the plan, whose first part is the action. Training on
the assistant messages alone teaches format, game and levels.
"""

import hashlib
import json
import logging
import multiprocessing
import os
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from agent_system.environments.base import Task
from agent_system.environments.env_package.alfworld import games
from agent_system.environments.env_package.alfworld.expert import Decision, Expert
from agent_system.environments.env_package.alfworld.settings import AlfworldSettings
from agent_system.environments.env_package.alfworld.store import generated_tasks
from verl.utils.processes import die_with_parent
from verl.utils.seeds import derive_seed

logger = logging.getLogger(__name__)

VERSION = 2  # part of every file's name: raise it when the same settings would give other lines
EPISODES_PER_GAME = 3  # translating a new game costs as much as playing ten episodes of it
TIMEOUT_S = 1800
MAX_STEPS = 15  # of an episode, where the settings say nothing
# Settings that shape the lines; the others say where games are kept and which are official.
SHAPING = {"task_types", "receptacles", "objects", "seed", "prompt"}
LEVELS = (1, 2, 3, 4)


@dataclass(frozen=True, slots=True)
class Play:
    """What a worker is asked to play: a task, the seed of its episodes, and how."""

    task: Task
    seed: int
    noise: tuple[float, float]  # slack, slips
    levels: tuple[int, ...]


def thought(level: int, decision: Decision) -> str:
    """The thought of ``level`` about a decision; each level says all that the level below says, and
    more.
    """
    parts = ("", decision.situation, decision.tried, f"plan {decision.plan}")
    return " ".join(f"{part}." for part in parts[1:level])


def render(level: int | None, decision: Decision) -> str:
    """The assistant message: exactly what a rollout's response looks like.

    Without a level, the action alone.
    """
    if level is None:
        return f"<action>{decision.action}</action>"
    return f"<level>{level}</level><think>{thought(level, decision)}</think><action>{decision.action}</action>"


def drawn_levels(levels: Sequence[int], rng: random.Random) -> Iterator[int | None]:
    """A level for every step, drawn uniformly whatever went before: the policy learns the odds and
    no order.

    Without levels, ``None`` for ever.
    """
    while True:
        yield rng.choice(levels) if levels else None


def write_demonstrations(
    settings: AlfworldSettings,
    out_dir: str | Path,
    num_episodes: int,
    seed: int = 0,
    num_workers: int = 2,
    slack: float = 0.35,
    levels: Sequence[int] = LEVELS,
    slips: float = 0.05,
) -> Path:
    """Play ``num_episodes`` expert episodes and write the won ones; return the JSONL file.

    The games of ``settings`` are generated ones whatever its ``source``; ``max_steps`` in it bounds an
    episode. ``slack`` is the share of useless but valid actions,
    ``slips`` the share of actions that cannot work, ``num_workers`` the number of processes (0:
    play in this one), ``levels`` the thinking levels to draw (none: actions alone, and prompts that
    ask for no levels). The file's name is a hash of all that shapes it, and an existing file is
    returned at once. The lines do not depend on ``num_workers``. Raises ``ValueError`` for settings
    that cannot work.
    """
    if (
        num_episodes < 1
        or min(slack, slips) < 0
        or slack + slips >= 1
        or not set(levels) <= set(LEVELS)
    ):
        raise ValueError(
            "demonstrations need num_episodes >= 1, slack and slips >= 0 that sum to less than 1, and levels among "
            f"1..4, not {num_episodes}, {slack}, {slips} and {list(levels)}"
        )
    path = (
        Path(out_dir)
        / f"demonstrations-{_key(settings, num_episodes, seed, slack, slips, levels)}.jsonl"
    )
    if path.exists():
        logger.info("demonstrations: re-using %s", path)
        return path
    tasks = generated_tasks(settings, "demo", count=-(-num_episodes // EPISODES_PER_GAME))
    noise = (slack, slips)
    plan = [
        Play(task, derive_seed("demo", seed, number), noise, tuple(levels))
        for number, task in enumerate(tasks)
    ]
    lines = _play_all(settings, plan, num_workers, num_episodes)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    with open(temporary, "w") as file:
        file.writelines(line + "\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    logger.info(
        "demonstrations: %d of %d episodes won, written to %s", len(lines), num_episodes, path
    )
    return path


def _key(settings: AlfworldSettings, *shape_of_play: Any) -> str:
    shape = settings.model_dump(mode="json", include=SHAPING) | {"max_steps": _max_steps(settings)}
    key = [
        VERSION,
        games.GENERATOR,
        EPISODES_PER_GAME,
        metadata.version("alfworld"),
        shape,
        *shape_of_play,
    ]
    return hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=8).hexdigest()


def _max_steps(settings: AlfworldSettings) -> int:
    return settings.max_steps or MAX_STEPS


def _play_all(
    settings: AlfworldSettings, plan: list[Play], num_workers: int, num_episodes: int
) -> list[str]:
    """The lines of the won episodes, in the order of ``plan``."""
    if num_workers == 0:
        played = [play_games(settings, plan)]
    else:
        size = max(1, min(32, -(-len(plan) // num_workers)))
        chunks = [plan[start : start + size] for start in range(0, len(plan), size)]
        context = multiprocessing.get_context(
            "spawn"
        )  # a fork would copy the threads of torch and Ray
        pool = ProcessPoolExecutor(num_workers, mp_context=context, initializer=die_with_parent)
        try:
            played = list(pool.map(play_games, [settings] * len(chunks), chunks, timeout=TIMEOUT_S))
        finally:
            for process in list(
                (pool._processes or {}).values()
            ):  # all is played, or one of them hangs
                process.kill()
            pool.shutdown(wait=False, cancel_futures=True)
    episodes = [episode for chunk in played for episode in chunk][:num_episodes]
    return [line for line in episodes if line is not None]


def play_games(settings: AlfworldSettings, plan: list[Play]) -> list[str | None]:
    """``EPISODES_PER_GAME`` episodes of each game as JSON lines; ``None`` for an episode that was
    not won.
    """
    from agent_system.environments.env_package.alfworld.package import PACKAGE

    env = PACKAGE.make(settings)
    prompts = PACKAGE.prompts(settings)
    lines = []
    try:
        for play in plan:
            for repetition in range(EPISODES_PER_GAME):
                rng = random.Random(derive_seed(play.seed, repetition))
                episode = play_episode(env, prompts, play, rng, _max_steps(settings))
                lines.append(json.dumps(episode) if episode else None)
    finally:
        env.close()
    return lines


def play_episode(
    env, prompts, play: Play, rng: random.Random, max_steps: int
) -> dict[str, Any] | None:
    """One expert episode as a JSONL row, or ``None`` where it was not won in ``max_steps``."""
    observation = env.reset(play.task, 0)
    expert, level_of_step = (
        Expert(observation.text, rng, *play.noise),
        drawn_levels(play.levels, rng),
    )
    asks = bool(play.levels)
    system = prompts.system(asks)
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompts.first(observation, asks)})
    levels, idle, failing = [], [], []
    for _ in range(max_steps):
        decision, level = expert.act(), next(level_of_step)
        levels.append(level)
        idle.append(decision.slack)
        failing.append(decision.slip)
        messages.append({"role": "assistant", "content": render(level, decision)})
        observation, _, done, _ = env.step(decision.action)
        if done:
            facts = {key: play.task[key] for key in ("task_id", "data_source", "kind")}
            return {
                **facts,
                "levels": levels,
                "slack": idle,
                "slips": failing,
                "messages": messages,
            }
        expert.observe(decision.action, observation.text)
        messages.append({"role": "user", "content": prompts.turn(observation)})
    return None


def texts(path: str | Path) -> Iterator[str]:
    """Every message of a demonstrations file, for training a tokenizer."""
    with open(path) as file:
        for line in file:
            for message in json.loads(line)["messages"]:
                yield message["content"]
