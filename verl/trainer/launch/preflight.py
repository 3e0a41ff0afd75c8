"""What is refused with the environment, the tokenizer and the engine at hand, before anything is
started.

``verl.trainer.config.validate`` reads the config alone; these checks import what the config names.
"""

from collections.abc import Iterator

from agent_system.environments.base import Observation
from agent_system.environments.env_registry import (
    MissingExtra,
    UnknownEnvironment,
    env_settings,
    get_package,
)
from agent_system.environments.failure import EnvFailure, WorkerStartError
from agent_system.environments.jvm import JavaMissing
from agent_system.environments.manager import EnvironmentManagerBase, make_envs
from agent_system.multi_turn_rollout.collector_worker import PolicyTokenizer
from agent_system.multi_turn_rollout.first_prompts import first_observations, first_prompt_lengths
from agent_system.multi_turn_rollout.play_settings import check_prompts, refuse_images
from agent_system.multi_turn_rollout.prompt_fit import fit_prompts
from agent_system.reward_manager import load_reward_manager
from verl.trainer.config.derive import plays_files
from verl.trainer.config.problems import problem
from verl.trainer.config.schema import PPOConfig
from verl.trainer.launch.preflight_machine import machine_problems
from verl.trainer.launch.preflight_model import load_tokenizer, model_problems, tokenizer_directory
from verl.utils.settings import ConfigError
from verl.utils.waits import logged_wait
from verl.workers.rollout.engine_registry import ENGINES, engine_class

ENGINE = "actor_rollout_ref.rollout.name"
PROMPT = "data.max_prompt_length"
LOOKED_AT = 16  # tasks whose first prompts are measured


def start_problems(cfg: PPOConfig) -> list[str]:
    """Messages of all checks on a config that has no other problem: key, value, why, allowed,
    fix.
    """
    found = [
        *machine_problems(cfg),
        *_environment_problems(cfg),
        *model_problems(cfg),
        *_engine_problems(cfg),
        *_reward_problems(cfg),
    ]
    # Of a policy that is yet to be made, prompts are measured once it is there.
    path = None if found else tokenizer_directory(cfg)
    if path is not None:
        found += prompt_problems(cfg, load_tokenizer(cfg, path))
    return found


def environment_problems(cfg: PPOConfig) -> Iterator[str]:
    """The environment has tasks and opens."""
    _, problems = _opened(cfg)
    yield from problems


def prompt_problems(cfg: PPOConfig, tokenizer: PolicyTokenizer) -> Iterator[str]:
    """The environment opens, and what it says first fits ``data.max_prompt_length``: a play whose
    prompt does not fit would be left out.
    """
    seen, problems = _opened(cfg)
    yield from problems
    if plays_files(cfg) and not problems:
        yield from _row_problems(cfg, tokenizer)
        return
    lengths = first_prompt_lengths(cfg, tokenizer, seen)
    longest = max(lengths, default=0)
    limit = cfg.data.max_prompt_length
    if longest > limit:
        longer = sum(length > limit for length in lengths)
        why = (
            f"{longer} of {len(lengths)} first prompts are longer, and their plays would be left "
            f"out; the longest has {longest} tokens"
        )
        yield problem(cfg, PROMPT, why, f"{longest} or more", f"{PROMPT}={_rounded(longest)}")


def _row_problems(cfg: PPOConfig, tokenizer: PolicyTokenizer) -> Iterator[str]:
    """Of files every prompt is measured: what does not fit is left out, cut or refused."""
    try:
        for envs in make_envs(cfg):
            fit_prompts(cfg, tokenizer, envs)
    except ConfigError as error:
        yield from error.problems
    except ValueError as error:
        yield str(error)


def _opened(cfg: PPOConfig) -> tuple[list[Observation], list[str]]:
    """What some tasks begin with, and why there is nothing to be seen."""
    name = f"env.env_name={cfg.env.env_name!r}"
    try:
        with logged_wait(f"the first tasks of {cfg.env.env_name}", cfg.trainer.waiting_log_s):
            envs = EnvironmentManagerBase(cfg, "train")
            return first_observations(envs, min(LOOKED_AT, len(envs.tasks))), []
    except ConfigError as error:
        return [], error.problems  # says itself which key and file is to blame
    except (ImportError, JavaMissing, OSError, ValueError) as error:
        why = f"has no tasks: {error}; allowed: an environment that has some"
    except (EnvFailure, WorkerStartError) as error:
        why = f"does not open: {error}; allowed: an environment that opens"
    return [], [f"{name} {why}; fix: docs/environments.md"]


def _rounded(tokens: int) -> int:
    """``tokens`` and a little more, for prompts that were not looked at."""
    return -(-tokens * 5 // 4 // 64) * 64


def _environment_problems(cfg: PPOConfig) -> Iterator[str]:
    """The environment is there, and its prompts say what is asked of them."""
    name = cfg.env.env_name
    try:
        package = get_package(name)
        package.prompts(env_settings(cfg.env))
    except ConfigError as error:
        yield from error.problems
        return
    except (UnknownEnvironment, MissingExtra, AttributeError, TypeError, ValueError) as error:
        yield (
            f"env.env_name={name!r}: {error}; allowed: an environment that is installed; "
            "fix: docs/environments.md"
        )
        return
    try:
        check_prompts(cfg, package)
        refuse_images(cfg)
    except ValueError as error:
        yield str(error)


def _engine_problems(cfg: PPOConfig) -> Iterator[str]:
    """The engine says with which log-probs it sampled: PPO's ratio and the token ledger need
    them.
    """
    name = cfg.actor_rollout_ref.rollout.name
    allowed = f"{', '.join(ENGINES)}, or module:Class of an engine that gives them"
    try:
        cls = engine_class(name)
    except (ImportError, AttributeError, ValueError) as error:
        yield f"{ENGINE}={name!r}: {error}; allowed: {allowed}; fix: mend the name"
        return
    if not getattr(cls, "gives_logprobs", False):
        why = "it does not give the log-probs of the tokens it samples (attribute gives_logprobs)"
        yield f"{ENGINE}={name!r}: {why}; allowed: {allowed}; fix: {ENGINE}=vllm"


def _reward_problems(cfg: PPOConfig) -> Iterator[str]:
    """The reward manager takes what it is given; a function of the user's own is there."""
    try:
        load_reward_manager(cfg)
    except (OSError, ImportError, AttributeError, TypeError, ValueError) as error:
        yield str(error)
