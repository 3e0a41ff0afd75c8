"""Checks before a run starts that need the environment, the tokenizer and the engine.

``verl.config.validate`` checks the config alone. These checks import and open what it names.
"""

from collections.abc import Iterator, Sequence

from agent_system.environments.env import Observation
from agent_system.environments.env_registry import (
    MissingExtra,
    UnknownEnvironment,
    env_settings,
    get_package,
)
from agent_system.environments.jvm import JavaMissing
from agent_system.environments.manager import EnvironmentManagerBase, make_envs
from agent_system.environments.pool.failure import EnvFailure, WorkerStartError
from agent_system.multi_turn_rollout.collector_worker import PolicyTokenizer
from agent_system.multi_turn_rollout.first_prompts import (
    check_first_tokens,
    collect_first_observations,
    fit_prompts,
    measure_first_prompts,
)
from agent_system.multi_turn_rollout.rollout_settings import check_prompts, refuse_images
from agent_system.reward_manager import load_reward_manager
from verl.config.derive import declared_tasks, uses_file_tasks
from verl.config.problems import build_problem
from verl.config.schema import PPOConfig
from verl.config.settings import ConfigError
from verl.trainer.cli import Inspection
from verl.trainer.launch.preflight_machine import find_machine_problems
from verl.trainer.launch.preflight_model import (
    collect_model_facts,
    find_model_problems,
    find_tokenizer_directory,
    load_tokenizer,
)
from verl.utils.chat_template import TemplateUnsupported
from verl.utils.waits import log_waiting
from verl.workers.rollout.engine_registry import ENGINES, import_engine_class

ENGINE_KEY = "actor_rollout_ref.rollout.name"
PROMPT_KEY = "data.max_prompt_length"
Counts = dict[str, int]  # number of tasks under the keys train_tasks and val_tasks
MEASURED_TASKS = 16  # number of tasks whose first prompts are measured


def find_start_problems(cfg: PPOConfig) -> list[str]:
    """Check environment, models, engine and hardware by loading them, and return the problems.

    ``cfg`` must have passed ``verl.config.validate``.
    """
    return list(inspect_start(cfg).problems)


def inspect_start(cfg: PPOConfig, elsewhere: bool = False) -> Inspection:
    """Return problems and facts of all checks on a config that passed ``verl.config.validate``.

    With ``elsewhere`` the run is for another machine, so that the devices of this one are ignored.
    """
    problems = [
        *find_machine_problems(cfg, elsewhere),
        *_find_environment_problems(cfg),
        *find_model_problems(cfg),
        *_find_engine_problems(cfg),
        *_find_reward_problems(cfg),
    ]
    counts: Counts = {}
    # If a cold start has to create the policy, prompts are measured after it.
    path = None if problems else find_tokenizer_directory(cfg)
    if path is not None:
        problems += find_prompt_problems(cfg, load_tokenizer(cfg, path), counts)
    return Inspection(problems, {} if problems else {**collect_model_facts(cfg), **counts})


def inspect_environment(cfg: PPOConfig) -> Inspection:
    """Return the problems of opening the environment, and its numbers of tasks."""
    counts: Counts = {}
    _, problems = _open_environment(cfg, counts)
    return Inspection(problems, counts)


def find_prompt_problems(
    cfg: PPOConfig, tokenizer: PolicyTokenizer, counts: Counts | None = None
) -> Iterator[str]:
    """Yield problems of opening the environment, and of first prompts that are too long.

    A trajectory whose prompt exceeds ``data.max_prompt_length`` would be dropped. The numbers of
    tasks are stored in ``counts``.
    """
    counts = {} if counts is None else counts
    observations, problems = _open_environment(cfg, counts)
    yield from problems
    yield from _find_token_problems(cfg, tokenizer, observations)
    if uses_file_tasks(cfg) and not problems:
        yield from _find_row_problems(cfg, tokenizer, counts)
        return
    lengths = measure_first_prompts(cfg, tokenizer, observations)
    max_len = max(lengths, default=0)
    limit = cfg.data.max_prompt_length
    if max_len > limit:
        longer = sum(length > limit for length in lengths)
        why = (
            f"{longer} of {len(lengths)} first prompts are longer, so their trajectories would be "
            f"dropped; the longest has {max_len} tokens"
        )
        yield build_problem(
            cfg, PROMPT_KEY, why, f"{max_len} or more", f"{PROMPT_KEY}={_round_up(max_len)}"
        )


def _find_token_problems(
    cfg: PPOConfig, tokenizer: PolicyTokenizer, observations: list[Observation]
) -> Iterator[str]:
    """Yield a problem if the chat template does not support the prompts of the environment."""
    try:
        check_first_tokens(cfg, tokenizer, observations)
    except TemplateUnsupported as error:
        yield (
            f"actor_rollout_ref.model.path={cfg.actor_rollout_ref.model.path!r}: {error}; allowed: "
            f"a chat template that supports the prompts of env.env_name={cfg.env.env_name!r}; fix: "
            "put another chat_template.jinja into its directory, or set env.history=window"
        )


def open_tasks(cfg: PPOConfig) -> tuple[EnvironmentManagerBase, EnvironmentManagerBase]:
    """Return the managers of training and validation tasks; with ``val_only`` one for both."""
    if cfg.trainer.val_only:
        val_envs = EnvironmentManagerBase(cfg, "val")
        return val_envs, val_envs
    return make_envs(cfg)


def _find_row_problems(cfg: PPOConfig, tokenizer: PolicyTokenizer, counts: Counts) -> Iterator[str]:
    """Yield problems of the prompts in the data files. The token counts of all prompts are checked.

    Prompts that are too long are dropped, truncated or refused, as ``data.truncation`` states.
    """
    try:
        train, val = open_tasks(cfg)
        for envs in (train, val):
            fit_prompts(cfg, tokenizer, envs)
        counts |= {"train_tasks": len(train.task_list), "val_tasks": len(val.panel)}
    except ConfigError as error:
        yield from error.problems
    except ValueError as error:
        yield str(error)


def _open_environment(cfg: PPOConfig, counts: Counts) -> tuple[list[Observation], Sequence[str]]:
    """Return the first observations of up to 16 tasks, and the problems of opening them."""
    name = f"env.env_name={cfg.env.env_name!r}"
    try:
        with log_waiting(f"the first tasks of {cfg.env.env_name}", cfg.trainer.waiting_log_s):
            split = "val" if cfg.trainer.val_only else "train"
            envs = EnvironmentManagerBase(cfg, split)
            counts |= _count_tasks(cfg, envs)
            return collect_first_observations(envs, min(MEASURED_TASKS, len(envs.task_list))), []
    except ConfigError as error:
        return [], error.problems  # its messages name the key and the file
    except (ImportError, JavaMissing, OSError, ValueError, RecursionError) as error:
        why = f"has no tasks: {error}; allowed: an environment with tasks"
    except (EnvFailure, WorkerStartError) as error:
        why = f"cannot be opened: {error}; allowed: an environment that opens"
    return [], [f"{name} {why}; fix: see docs/environments.md"]


def _count_tasks(cfg: PPOConfig, envs: EnvironmentManagerBase) -> Counts:
    """Return the numbers of tasks.

    The validation tasks are created only to count them, if the settings do not declare their
    number.
    """
    if envs.split == "val":
        return {"val_tasks": len(envs.panel)}
    if uses_file_tasks(cfg):
        return {}  # counted after their prompts are measured
    if declared_tasks(cfg.env, "val") is not None:
        return {"train_tasks": len(envs.task_list)}
    val_tasks = EnvironmentManagerBase(cfg, "val").panel
    return {"train_tasks": len(envs.task_list), "val_tasks": len(val_tasks)}


def _round_up(tokens: int) -> int:
    """Return ``tokens`` plus 25%, rounded up to a multiple of 64.

    The margin is for prompts of other tasks, whose lengths were not measured.
    """
    return -(-tokens * 5 // 4 // 64) * 64


def _find_environment_problems(cfg: PPOConfig) -> Iterator[str]:
    """Yield problems of importing the environment and of its prompts and images."""
    name = cfg.env.env_name
    try:
        package = get_package(name)
        package.prompts(env_settings(cfg.env))
    except ConfigError as error:
        yield from error.problems
        return
    except (UnknownEnvironment, MissingExtra, AttributeError, TypeError, ValueError) as error:
        yield (
            f"env.env_name={name!r}: {error}; allowed: an installed environment; "
            "fix: see docs/environments.md"
        )
        return
    try:
        check_prompts(cfg, package)
        refuse_images(cfg)
    except ValueError as error:
        yield str(error)


def _find_engine_problems(cfg: PPOConfig) -> Iterator[str]:
    """Yield a problem if the engine does not exist or returns no log-probs, which PPO needs."""
    name = cfg.actor_rollout_ref.rollout.name
    allowed = f"{', '.join(ENGINES)}, or module:Class of an engine that returns log-probs"
    try:
        cls = import_engine_class(name)
    except (ImportError, AttributeError, ValueError) as error:
        yield f"{ENGINE_KEY}={name!r}: {error}; allowed: {allowed}; fix: correct the name"
        return
    if not getattr(cls, "gives_logprobs", False):
        why = "it returns no log-probs of the sampled tokens (attribute gives_logprobs)"
        yield f"{ENGINE_KEY}={name!r}: {why}; allowed: {allowed}; fix: set {ENGINE_KEY}=vllm"


def _find_reward_problems(cfg: PPOConfig) -> Iterator[str]:
    """Yield a problem if the reward manager or a user-provided reward function cannot be loaded."""
    try:
        load_reward_manager(cfg)
    except (OSError, ImportError, AttributeError, TypeError, ValueError) as error:
        yield str(error)
