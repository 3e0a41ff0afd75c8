"""Checks before a run starts that import the code and open the files that the config names."""

from collections.abc import Iterator

from agent_system.environments.env_registry import (
    MissingExtraError,
    UnknownEnvironmentError,
    get_package,
    read_env_settings,
)
from agent_system.multi_turn_rollout.rollout_settings import (
    check_compaction,
    check_level_prompts,
    refuse_images,
)
from agent_system.reward_manager import load_reward_manager
from verl.config.schema import PPOConfig
from verl.config.settings import ConfigError, Problem
from verl.config.settings.errors import get_problem_code
from verl.trainer.cli import PreflightResult
from verl.trainer.launch.preflight_machine import find_machine_problems
from verl.trainer.launch.preflight_model import (
    collect_model_facts,
    find_model_problems,
    find_tokenizer_directory,
)
from verl.trainer.launch.preflight_prompts import TaskCounts, find_prompt_problems
from verl.trainer.launch.preflight_resume import find_changed_task_problems, find_resume_problems
from verl.trainer.launch.preflight_weights import load_tokenizer
from verl.workers.rollout.engine_registry import ENGINES, import_engine_class

ENGINE_KEY = "actor_rollout_ref.rollout.name"


def run_preflight_checks(cfg: PPOConfig, ignores_local_devices: bool = False) -> PreflightResult:
    """Return the problems that the checks of this module find, and facts for the printed plan."""
    problems = [
        *find_machine_problems(cfg, ignores_local_devices),
        *_find_environment_problems(cfg),
        *find_model_problems(cfg),
        *_find_engine_problems(cfg),
        *_find_reward_problems(cfg),
    ]
    if not problems:
        problems += [*find_changed_task_problems(cfg), *find_resume_problems(cfg)]
    task_counts: TaskCounts = {}
    # Without a tokenizer, prompts cannot be measured yet. The cold start (supervised training of a
    # missing policy) creates it, and the prompts are measured afterwards.
    tokenizer_directory = None if problems else find_tokenizer_directory(cfg)
    if tokenizer_directory is not None:
        tokenizer = load_tokenizer(
            tokenizer_directory, cfg.actor_rollout_ref.model.trust_remote_code
        )
        problems += find_prompt_problems(cfg, tokenizer, task_counts)
    return PreflightResult(
        problems, {} if problems else {**collect_model_facts(cfg), **task_counts}
    )


def _find_environment_problems(cfg: PPOConfig) -> Iterator[Problem]:
    """Yield a problem if the environment cannot be imported or does not suit the config."""
    name = cfg.env.env_name
    try:
        package = get_package(name)
        package.prompts(read_env_settings(cfg.env))
    except ConfigError as error:
        yield from error.problems
        return
    except (
        UnknownEnvironmentError,
        MissingExtraError,
        AttributeError,
        TypeError,
        ValueError,
    ) as error:
        yield Problem(
            f"env.env_name={name!r}: {error}; allowed: an installed environment; "
            "fix: see docs/environments.md",
            get_problem_code(error, "failed_call"),
        )
        return
    try:
        check_level_prompts(cfg, package)
        check_compaction(cfg, package)
        refuse_images(cfg)
    except ValueError as error:
        yield Problem(str(error), "conflicting_keys")


def _find_engine_problems(cfg: PPOConfig) -> Iterator[Problem]:
    """Yield a problem if the engine cannot be imported or returns no log-probs, which PPO needs."""
    name = cfg.actor_rollout_ref.rollout.name
    allowed = f"{', '.join(ENGINES)}, or module:Class of an engine that returns log-probs"
    try:
        cls = import_engine_class(name)
    except (ImportError, AttributeError, ValueError) as error:
        message = f"{ENGINE_KEY}={name!r}: {error}; allowed: {allowed}; fix: correct the name"
        yield Problem(message, get_problem_code(error, "invalid_syntax"))
        return
    if not getattr(cls, "gives_logprobs", False):
        why = "it returns no log-probs of the sampled tokens (attribute gives_logprobs)"
        message = f"{ENGINE_KEY}={name!r}: {why}; allowed: {allowed}; fix: set {ENGINE_KEY}=vllm"
        yield Problem(message, "unsupported_model")


def _find_reward_problems(cfg: PPOConfig) -> Iterator[Problem]:
    try:
        load_reward_manager(cfg)
    except (OSError, ImportError, AttributeError, TypeError, ValueError) as error:
        yield Problem(str(error), get_problem_code(error, "failed_call"))
