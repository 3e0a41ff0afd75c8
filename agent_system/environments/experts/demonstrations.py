"""Demonstrations: episodes of an environment's expert whose steps carry thinking levels in balance.

One JSONL line per won episode (lost ones as well where the expert says so), on training tasks or
tasks of their own (see ``Expert``)::

    {"task_id": str, "data_source": str, "kind": str,  # "kind" where tasks have one
     "levels": [int | None, ...], "slack": [bool, ...], "slips": [bool, ...],  # one per step
     "messages": [{"role": "user" | "assistant" | "system", "content": str}, ...]}

The user messages are what the package's prompts say in a rollout with ``append`` history and levels
asked for; as with ``window`` history every step is a line of its own, whose one user message is the
whole prompt. The assistant messages have exactly the rollout's form, such as
``<level>2</level><think>need mug.</think><action>look</action>``. Level 1 thinks nothing, 2 notes
the situation, 3 adds what was tried, 4 adds the plan, whose first part is the action; an expert may
write the thoughts of levels itself. Training on the assistant messages alone teaches format, game
and levels.
"""

import hashlib
import importlib
import inspect
import json
import logging
import multiprocessing
import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agent_system.environments.env import Task
from agent_system.environments.env_registry import REGISTRY, MissingExtra, get_package, resolve
from agent_system.environments.expert_protocol import EpisodeStart, Expert, Noise
from agent_system.environments.experts.episode import ExpertEpisode, LevelDraw, now
from agent_system.environments.package import EnvPackage
from agent_system.environments.settings import EnvSettings
from agent_system.environments.tasks import SEED_BITS
from verl.utils.files import atomic_write
from verl.utils.processes import die_with_parent
from verl.utils.progress import Progress
from verl.utils.seeds import derive_seed

logger = logging.getLogger(__name__)

LEVELS = (1, 2, 3, 4)
# Of an episode, where the settings do not say.
MAX_STEPS = 15
# That a worker is handed, at most: few, so that the last one to finish is not waited for long.
TASKS_AT_A_TIME = 32
TIMEOUT_S = 1800


class NoExpert(ValueError):
    """Nobody can play the environment; the message names the environments that have an expert."""


@dataclass(frozen=True, slots=True)
class DemonstrationOptions:
    """What makes two files of demonstrations of one environment differ, besides its settings."""

    num_episodes: int
    seed: int
    noise: Noise
    levels: tuple[int, ...]
    needed_level_share: float = 0.0
    # Past steps that a prompt shows, where every step is a row; None: an episode is a row.
    window: int | None = None


@dataclass(frozen=True, slots=True)
class DemonstrationTask:
    """What a worker is asked to play: a task so many times, the seed of its episodes, and how."""

    task: Task
    repetitions: int
    seed: int
    shape: DemonstrationOptions


# ---------------------------------------------------------------------- who has an expert


def expert_of(env_name: str) -> Expert:
    """The expert of the environment.

    Raises ``NoExpert`` where it has none, and what ``get_package`` raises.
    """
    expert = get_package(env_name).expert
    if expert is None:
        raise NoExpert(
            f"no expert plays {env_name!r}; environments with one: {', '.join(with_expert())}"
        )
    return expert


def with_expert() -> list[str]:
    """Names of the registered environments that have an expert and are installed."""
    found = []
    for name in sorted(REGISTRY):
        try:
            package = get_package(name)
        except MissingExtra:
            continue
        if package.expert is not None:
            found.append(name)
    return found


# ---------------------------------------------------------------------- writing


def write_demonstrations(
    env_name: str,
    settings: EnvSettings,
    out_dir: str | Path,
    num_episodes: int,
    seed: int = 0,
    num_workers: int = 2,
    slack: float = 0.35,
    levels: Sequence[int] = LEVELS,
    slips: float = 0.05,
    needed_level_share: float = 0.0,
    window: int | None = None,
) -> Path:
    """Play ``num_episodes`` expert episodes and write the won ones; return the JSONL file.

    Args:
        env_name: The environment, as the registry knows it.
        settings: Its settings; ``max_steps`` in them bounds an episode.
        out_dir: Where the file goes. Its name is a hash of all that shapes it, and an existing file
            is returned at once.
        num_episodes: Episodes played. Where there are fewer tasks, each is played several times.
        seed: Of what the expert leaves to chance.
        num_workers: Processes that play; 0: this one. The lines do not depend on it.
        slack, slips: As in ``Noise``.
        levels: The thinking levels to draw from; none: actions alone, and prompts that ask for no
            levels.
        needed_level_share: Share of the steps that take the level the expert calls needed.
        window: Past steps that a prompt shows, as in a rollout with ``window`` history: every step
            is then a line of its own. None: ``append`` history, an episode is a line.

    Raises ``NoExpert`` for an environment without expert, ``ValueError`` for settings that cannot
    work or where no episode was won.
    """
    expert = expert_of(env_name)
    sound = num_episodes >= 1 and min(slack, slips) >= 0 and slack + slips < 1
    if not sound or not set(levels) <= set(expert.levels):
        raise ValueError(
            "demonstrations need num_episodes >= 1, slack and slips >= 0 that sum to less than 1, "
            f"and levels among {_range(expert.levels)}, not {num_episodes}, {slack}, {slips} and "
            f"{list(levels)}"
        )
    tells = expert.tells_needed_level(settings)
    if not 0 <= needed_level_share <= 1 or (needed_level_share and not tells):
        raise ValueError(
            f"needed_level_share={needed_level_share}: allowed is a share from 0 to 1, and 0 alone "
            f"for {env_name!r}, whose expert "
            f"{'tells' if tells else 'does not tell'} which level is needed"
        )
    noise = Noise(slack, slips)
    shape = DemonstrationOptions(
        num_episodes, seed, noise, tuple(levels), needed_level_share, window
    )
    path = Path(out_dir) / f"demonstrations-{_hash(env_name, expert, settings, shape)}.jsonl"
    # The name is a hash of all that shapes the file, and a file appears whole or not at all.
    if path.exists():
        logger.info("demonstrations: re-using %s", path)
        return path
    plan = plan_of(get_package(env_name), expert, settings, shape)
    lines = _play_all(env_name, settings, plan, num_workers)[:num_episodes]
    kept = [line for line in lines if line is not None]
    if not kept:
        raise ValueError(
            f"demonstrations: none of {num_episodes} episodes was won within "
            f"{_max_steps(settings)} steps; allow more (env.max_steps), or less noise (data.noise)"
        )
    with atomic_write(path) as file:
        file.writelines(line + "\n" for line in kept)
    said = "played" if expert.keeps_lost else "won"
    logger.info(
        "demonstrations: %d of %d episodes %s, written to %s", len(kept), num_episodes, said, path
    )
    return path


def plan_of(
    package: EnvPackage, expert: Expert, settings: EnvSettings, shape: DemonstrationOptions
) -> list[DemonstrationTask]:
    """Which task is played how often: next to each other, so that a hold-out takes few tasks."""
    repetitions = expert.episodes_per_task
    # Rounded up, as below; the surplus is cut off after playing.
    count = -(-shape.num_episodes // repetitions)
    tasks = expert.tasks(settings, count) if expert.tasks else _training_tasks(package, settings)
    if len(tasks) < count:
        repetitions = -(-shape.num_episodes // len(tasks))
    wanted = -(-shape.num_episodes // repetitions)
    return [
        DemonstrationTask(task, repetitions, derive_seed("demo", shape.seed, number), shape)
        for number, task in enumerate(tasks[:wanted])
    ]


def _training_tasks(package: EnvPackage, settings: EnvSettings) -> list[Task]:
    """The training tasks in an order of their own, so that a part of them is a fair sample."""
    # A package may list tasks of a kind together: the first so many would be one-sided.
    tasks = package.tasks(settings, "train")
    return sorted(tasks, key=lambda task: derive_seed("demonstrations", task["task_id"]))


def _hash(env_name: str, expert: Expert, settings: EnvSettings, shape: DemonstrationOptions) -> str:
    key = expert.key(settings) if expert.key else _key(env_name, expert, settings)
    noise = asdict(shape.noise)
    shaping = [shape.num_episodes, shape.seed, *noise.values(), shape.levels]
    # Files that were written before there was a share keep their names.
    shaping += [shape.needed_level_share] if shape.needed_level_share else []
    shaping += [] if shape.window is None else ["window", shape.window]
    text = json.dumps([*key, *shaping], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _key(env_name: str, expert: Expert, settings: EnvSettings) -> list[Any]:
    key = [env_name, expert.version, settings.model_dump(mode="json")]
    module, colon, _ = env_name.partition(":")
    if not colon:
        return key
    # Of the user's own: it changes from try to try, and nobody raises a version for that.
    try:
        return [*key, inspect.getsource(importlib.import_module(module))]
    except OSError:  # compiled, or made at run time
        return key


def _range(levels: Sequence[int]) -> str:
    return f"{min(levels)}..{max(levels)}" if levels else "none"


def _max_steps(settings: EnvSettings) -> int:
    return settings.max_steps or MAX_STEPS


# ---------------------------------------------------------------------- playing


def _play_all(
    env_name: str, settings: EnvSettings, plan: list[DemonstrationTask], num_workers: int
) -> list[str | None]:
    """A line per episode in the order of ``plan``; ``None`` for one that is left out."""
    # Workers import the package from where it lives: names registered at run time are not theirs.
    place = resolve(env_name).target
    if num_workers == 0:
        return play_tasks(place, settings, plan)
    episodes = sum(play.repetitions for play in plan)
    # At least one chunk for each worker, where there are tasks enough.
    size = max(1, min(TASKS_AT_A_TIME, -(-len(plan) // num_workers)))
    chunks = [plan[start : start + size] for start in range(0, len(plan), size)]
    # A fork would copy the threads of torch and Ray.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, mp_context=context, initializer=die_with_parent)
    try:
        places = [place] * len(chunks)
        copies = [settings] * len(chunks)
        lines: list[str | None] = []
        with Progress("demonstrations", episodes, "episodes") as progress:
            for chunk in pool.map(play_tasks, places, copies, chunks, timeout=TIMEOUT_S):
                lines += chunk
                progress.to(len(lines))
    finally:
        # All is played, or one of them hangs: then waiting for it would be for ever.
        for process in list((pool._processes or {}).values()):
            process.kill()
        pool.shutdown(wait=False, cancel_futures=True)
    return lines


def play_tasks(
    place: str, settings: EnvSettings, plan: list[DemonstrationTask]
) -> list[str | None]:
    """The episodes of ``plan`` as JSON lines; ``None`` for one that was lost, where the expert does
    not keep those.

    ``place`` is the package's ``module:attribute``.
    """
    package = get_package(place)
    expert = expert_of(place)
    env = package.make(settings)
    prompts = package.prompts(settings)
    lines: list[str | None] = []
    try:
        for play in plan:
            for repetition in range(play.repetitions):
                # Of task and repetition alone: the number of workers must not show in the lines.
                seed = derive_seed(play.seed, repetition)
                first = now(env.reset(play.task, derive_seed(seed, "env") & SEED_BITS))
                rng = random.Random(seed)
                player = expert.start(
                    EpisodeStart(settings, play.task, first, rng, play.shape.noise)
                )
                draw = LevelDraw(play.shape.levels, rng, play.shape.needed_level_share)
                asks = bool(play.shape.levels)
                episode = ExpertEpisode(env, prompts, play.task, first, asks, play.shape.window)
                won = episode.run(player, draw, _max_steps(settings))
                # What is left out keeps its place: the caller counts episodes, not lines.
                kept = won or expert.keeps_lost
                rows = "\n".join(json.dumps(row) for row in episode.rows())
                lines.append(rows if kept else None)
    finally:
        env.close()
    return lines
