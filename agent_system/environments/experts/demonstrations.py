"""Demonstrations: episodes of an environment's expert, with a random thinking level in each turn.

The file has one JSON line per successful episode, or per episode if the expert keeps unsuccessful
ones. The fields are:

- ``task_id``, ``data_source``, and ``kind`` if the task has it: strings of the task.
- ``levels``: int or None for each turn.
- ``slack``, ``slips``: bool for each turn. They mark useless and invalid actions.
- ``messages``: dicts with ``role`` and ``content``.

User messages are the prompts of a rollout with ``env.history=append``. With the option ``window``
they are those of ``env.history=window``, and each turn is a separate line with one user message.
Assistant messages have the form of a rollout, such as
``<level>2</level><think>need mug.</think><action>look</action>``.
A thought of level 1 is empty. Level 2 has the situation, level 3 adds the last action and its
result, and level 4 adds the plan. An expert may write the thoughts itself.
"""

import contextlib
import functools
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

from agent_system.environments.env import Env, Prompts, Task
from agent_system.environments.env_registry import (
    REGISTRY,
    MissingExtraError,
    find_entry,
    get_package,
)
from agent_system.environments.event_loop import await_if_needed
from agent_system.environments.expert_protocol import EpisodeStart, Expert, Noise
from agent_system.environments.experts.episode import ExpertEpisode, LevelSampler
from agent_system.environments.package import EnvPackage
from agent_system.environments.settings import EnvSettings
from agent_system.environments.tasks import SEED_MASK, hash_json
from rlvcr.levels import LEVELS
from verl.utils.files import atomic_write
from verl.utils.processes import die_with_parent
from verl.utils.progress import Progress
from verl.utils.seeds import derive_seed

logger = logging.getLogger(__name__)

# Maximum turns of an episode if the settings have no ``max_steps``.
DEFAULT_MAX_STEPS = 15
# Maximum tasks per call of a worker. Small chunks keep the wait for the last worker short.
MAX_CHUNK_TASKS = 32
TIMEOUT_S = 1800  # seconds in which the workers must make all demonstrations


class NoExpertError(ValueError):
    """Error: the environment has no expert. The message names the environments that have one."""


@dataclass(frozen=True, slots=True)
class DemonstrationOptions:
    """Options of a demonstration file, in addition to the settings of the environment."""

    num_episodes: int
    seed: int
    noise: Noise
    levels: tuple[int, ...]
    needed_level_share: float = 0.0
    # Number of past turns in each prompt. Each turn is then one line of the file. None: each
    # episode is one line.
    window: int | None = None


# A task, and the seed of each of its demonstrated episodes.
TaskAndSeeds = tuple[Task, list[int]]


def get_expert(env_name: str) -> Expert:
    """Return the expert of the environment.

    Raises ``NoExpertError`` if it has none, and the errors of ``get_package``.
    """
    expert = get_package(env_name).expert
    if expert is not None:
        return expert
    names_with_expert = []
    for name in sorted(REGISTRY):
        with contextlib.suppress(MissingExtraError):
            names_with_expert += [name] if get_package(name).expert is not None else []
    raise NoExpertError(
        f"environment {env_name!r} has no expert; allowed: environments with one: "
        f"{', '.join(names_with_expert)}"
    )


def write_demonstrations(
    env_name: str,
    settings: EnvSettings,
    out_dir: str | Path,
    num_episodes: int,
    seed: int = 0,
    num_workers: int = 2,
    useless_share: float = 0.35,
    levels: Sequence[int] = LEVELS,
    invalid_share: float = 0.05,
    needed_level_share: float = 0.0,
    window: int | None = None,
) -> Path:
    """Run ``num_episodes`` episodes of the expert, write the successful ones, return the file.

    Args:
        env_name, settings: Environment. ``max_steps`` is the maximum length of an episode.
        out_dir: Directory of the file. The name of the file is a hash of all options and settings;
            an existing file is returned immediately.
        num_episodes: Number of episodes. If there are fewer tasks, tasks are repeated.
        seed: Seed of the expert's random choices.
        num_workers: Number of worker processes; 0: this process. The file does not depend on it.
        useless_share, invalid_share: Probabilities of a useless and of an invalid action as noise.
        levels: Thinking levels to draw from. Empty: actions only, and prompts without levels.
        needed_level_share: Share of turns that use the level that the expert names as needed.
        window: Number of past turns in a prompt; every turn is then one line of the file. None: as
            with ``env.history=append``, an episode is one line.

    Raises ``NoExpertError``, and ``ValueError`` if no episode was successful.
    """
    expert = get_expert(env_name)
    noise = Noise(useless_share, invalid_share)
    options = DemonstrationOptions(
        num_episodes, seed, noise, tuple(levels), needed_level_share, window
    )
    options_hash = _hash_options(env_name, expert, settings, options)
    path = Path(out_dir) / f"demonstrations-{options_hash}.jsonl"
    # An existing file is complete, because it is written atomically.
    if path.exists():
        logger.info("demonstrations: re-using %s", path)
        return path
    tasks = plan_demonstrations(get_package(env_name), expert, settings, options)
    lines = _run_in_workers(env_name, settings, options, tasks, num_workers)[:num_episodes]
    episode_lines = [line for line in lines if line is not None]
    if not episode_lines:
        raise ValueError(
            f"demonstrations: none of {num_episodes} episodes was successful within "
            f"{_get_max_steps(settings)} turns; fix: raise env.max_steps, or lower data.noise"
        )
    with atomic_write(path) as file:
        file.writelines(line + "\n" for line in episode_lines)
    outcome = "finished" if expert.keeps_unsuccessful else "successful"
    logger.info(
        "demonstrations: %d of %d episodes %s: %s", len(episode_lines), num_episodes, outcome, path
    )
    return path


def plan_demonstrations(
    package: EnvPackage, expert: Expert, settings: EnvSettings, options: DemonstrationOptions
) -> list[TaskAndSeeds]:
    """Return the tasks to demonstrate, each with the seeds of its episodes.

    Episodes of a task are consecutive in the file. Lines held out at the end of the file then
    belong to few tasks.
    """
    episodes_per_task = expert.episodes_per_task
    # The negations round the quotient up. The caller drops episodes beyond ``num_episodes``.
    num_tasks_wanted = -(-options.num_episodes // episodes_per_task)
    if expert.tasks:
        tasks = expert.tasks(settings, num_tasks_wanted)
    else:
        # A package may list tasks by kind, so take them in a random, fixed order.
        tasks = sorted(
            package.tasks(settings, "train"),
            key=lambda task: derive_seed("demonstrations", task["task_id"]),
        )
    if len(tasks) < num_tasks_wanted:
        episodes_per_task = -(-options.num_episodes // len(tasks))
    num_tasks = -(-options.num_episodes // episodes_per_task)
    task_seeds = [derive_seed("demo", options.seed, task_index) for task_index in range(num_tasks)]
    return [
        (task, [derive_seed(seed, episode_index) for episode_index in range(episodes_per_task)])
        for task, seed in zip(tasks[:num_tasks], task_seeds, strict=True)
    ]


def _hash_options(
    env_name: str, expert: Expert, settings: EnvSettings, options: DemonstrationOptions
) -> str:
    if expert.key:
        cache_key_values = expert.key(settings)
    else:
        cache_key_values = [env_name, expert.version, settings.model_dump(mode="json")]
        module_name, separator, _ = env_name.partition(":")
        if separator:
            # Include the source code of a user's module: users may change it without a new
            # ``version``. It is missing if the module is compiled, or made at run time.
            with contextlib.suppress(OSError):
                cache_key_values.append(inspect.getsource(importlib.import_module(module_name)))
    noise = asdict(options.noise)
    option_values = [options.num_episodes, options.seed, *noise.values(), options.levels]
    # Add needed_level_share only if it is not 0: files from before this option existed keep their
    # names.
    option_values += [options.needed_level_share] if options.needed_level_share else []
    option_values += [] if options.window is None else ["window", options.window]
    return hash_json([*cache_key_values, *option_values])


def _get_max_steps(settings: EnvSettings) -> int:
    return settings.max_steps or DEFAULT_MAX_STEPS


def _run_in_workers(
    env_name: str,
    settings: EnvSettings,
    options: DemonstrationOptions,
    tasks: list[TaskAndSeeds],
    num_workers: int,
) -> list[str | None]:
    """Run the episodes in ``num_workers`` processes. Return their JSON lines in task order."""
    # Pass the import path: workers do not know names that were registered at run time.
    run_chunk = functools.partial(
        run_task_chunk, find_entry(env_name).import_path, settings, options
    )
    if num_workers == 0:
        return run_chunk(tasks)
    # Make at least one chunk per worker if there are enough tasks.
    chunk_size = max(1, min(MAX_CHUNK_TASKS, -(-len(tasks) // num_workers)))
    chunks = [
        tasks[first_task_index : first_task_index + chunk_size]
        for first_task_index in range(0, len(tasks), chunk_size)
    ]
    # A fork would copy the threads of torch and Ray.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, mp_context=context, initializer=die_with_parent)
    try:
        lines: list[str | None] = []
        num_episodes = sum(len(seeds) for _, seeds in tasks)
        with Progress("demonstrations", num_episodes, "episodes") as progress:
            for chunk_lines in pool.map(run_chunk, chunks, timeout=TIMEOUT_S):
                lines += chunk_lines
                progress.set_done(len(lines))
    finally:
        # Kill the workers: ``shutdown`` would wait for ever for one that hangs.
        for process in list((pool._processes or {}).values()):
            process.kill()
        pool.shutdown(wait=False, cancel_futures=True)
    return lines


def run_task_chunk(
    import_path: str,
    settings: EnvSettings,
    options: DemonstrationOptions,
    tasks: list[TaskAndSeeds],
) -> list[str | None]:
    """Run the episodes of ``tasks`` in this process. Return the JSON lines of each episode.

    The entry of an unsuccessful episode is None, unless the expert keeps such episodes.
    """
    package = get_package(import_path)
    expert = get_expert(import_path)
    env = package.make(settings)
    prompts = package.prompts(settings)
    try:
        return [
            _run_episode(expert, env, prompts, settings, options, task, seed)
            for task, seeds in tasks
            for seed in seeds
        ]
    finally:
        env.close()


def _run_episode(
    expert: Expert,
    env: Env,
    prompts: Prompts,
    settings: EnvSettings,
    options: DemonstrationOptions,
    task: Task,
    seed: int,
) -> str | None:
    """Run one episode and return its JSON lines for the demonstration file.

    Return None for an unsuccessful episode, unless the expert keeps such episodes.
    """
    first_observation = await_if_needed(env.reset(task, derive_seed(seed, "env") & SEED_MASK))
    rng = random.Random(seed)
    policy = expert.start(EpisodeStart(settings, task, first_observation, rng, options.noise))
    sample_level = LevelSampler(options.levels, rng, options.needed_level_share)
    episode = ExpertEpisode(
        env, prompts, task, first_observation, bool(options.levels), options.window
    )
    is_success = episode.run(policy, sample_level, _get_max_steps(settings))
    if not is_success and not expert.keeps_unsuccessful:
        return None
    return "\n".join(json.dumps(row) for row in episode.to_rows())
