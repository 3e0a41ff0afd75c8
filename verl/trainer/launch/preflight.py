"""What is refused with the environment, the tokenizer and the engine at hand, before anything is
started.

``verl.config.validate`` reads the config alone; these checks import what the config names.
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
    first_observations,
    first_prompt_lengths,
)
from agent_system.multi_turn_rollout.play_settings import check_prompts, refuse_images
from agent_system.multi_turn_rollout.prompt_fit import fit_prompts
from agent_system.reward_manager import load_reward_manager
from agent_system.tokens.template import TemplateUnsupported
from verl.config.derive import declared_tasks, plays_files
from verl.config.problems import problem
from verl.config.schema import PPOConfig
from verl.config.settings import ConfigError
from verl.trainer.cli import Inspection
from verl.trainer.launch.preflight_machine import machine_problems
from verl.trainer.launch.preflight_model import (
    load_tokenizer,
    model_facts,
    model_problems,
    tokenizer_directory,
)
from verl.utils.waits import logged_wait
from verl.workers.rollout.engine_registry import ENGINES, engine_class

ENGINE = "actor_rollout_ref.rollout.name"
PROMPT = "data.max_prompt_length"
Counts = dict[str, int]  # train_tasks, val_tasks
LOOKED_AT = 16  # tasks whose first prompts are measured


def start_problems(cfg: PPOConfig) -> list[str]:
    """Messages of all checks on a config that has no other problem: key, value, why, allowed,
    fix.
    """
    return list(inspect_start(cfg).problems)


def inspect_start(cfg: PPOConfig, elsewhere: bool = False) -> Inspection:
    """All checks on a config that has no other problem, and what they found out for the plan;
    ``elsewhere``: on devices that are not here.
    """
    found = [
        *machine_problems(cfg, elsewhere),
        *_environment_problems(cfg),
        *model_problems(cfg),
        *_engine_problems(cfg),
        *_reward_problems(cfg),
    ]
    counts: Counts = {}
    # Of a policy that is yet to be made, prompts are measured once it is there.
    path = None if found else tokenizer_directory(cfg)
    if path is not None:
        found += prompt_problems(cfg, load_tokenizer(cfg, path), counts)
    return Inspection(found, {} if found else {**model_facts(cfg), **counts})


def inspect_environment(cfg: PPOConfig) -> Inspection:
    """The environment has tasks, opens, and has so many."""
    counts: Counts = {}
    _, problems = _opened(cfg, counts)
    return Inspection(problems, counts)


def prompt_problems(
    cfg: PPOConfig, tokenizer: PolicyTokenizer, counts: Counts | None = None
) -> Iterator[str]:
    """The environment opens, and what it says first fits ``data.max_prompt_length``: a play whose
    prompt does not fit would be left out. ``counts`` gets the numbers of tasks.
    """
    counts = {} if counts is None else counts
    seen, problems = _opened(cfg, counts)
    yield from problems
    yield from _token_problems(cfg, tokenizer, seen)
    if plays_files(cfg) and not problems:
        yield from _row_problems(cfg, tokenizer, counts)
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


def _token_problems(
    cfg: PPOConfig, tokenizer: PolicyTokenizer, seen: list[Observation]
) -> Iterator[str]:
    """The policy is shown the tokens that its chat template has."""
    try:
        check_first_tokens(cfg, tokenizer, seen)
    except TemplateUnsupported as error:
        yield (
            f"actor_rollout_ref.model.path={cfg.actor_rollout_ref.model.path!r}: {error}; allowed: "
            f"a chat template that suits the prompts of env.env_name={cfg.env.env_name!r}; fix: "
            "another chat_template.jinja in its directory, or env.history=window"
        )


def open_tasks(cfg: PPOConfig) -> tuple[EnvironmentManagerBase, EnvironmentManagerBase]:
    """What is trained on, and what is validated on: one and the same where nothing is trained."""
    if cfg.trainer.val_only:
        panel = EnvironmentManagerBase(cfg, "val")
        return panel, panel
    return make_envs(cfg)


def _row_problems(cfg: PPOConfig, tokenizer: PolicyTokenizer, counts: Counts) -> Iterator[str]:
    """Of files every prompt is measured: what does not fit is left out, cut or refused."""
    try:
        train, val = open_tasks(cfg)
        for envs in (train, val):
            fit_prompts(cfg, tokenizer, envs)
        counts |= {"train_tasks": len(train.tasks), "val_tasks": len(val.panel)}
    except ConfigError as error:
        yield from error.problems
    except ValueError as error:
        yield str(error)


def _opened(cfg: PPOConfig, counts: Counts) -> tuple[list[Observation], Sequence[str]]:
    """Return the first observations of some tasks, and the problems."""
    name = f"env.env_name={cfg.env.env_name!r}"
    try:
        with logged_wait(f"the first tasks of {cfg.env.env_name}", cfg.trainer.waiting_log_s):
            split = "val" if cfg.trainer.val_only else "train"
            envs = EnvironmentManagerBase(cfg, split)
            counts |= _counted(cfg, envs)
            return first_observations(envs, min(LOOKED_AT, len(envs.tasks))), []
    except ConfigError as error:
        return [], error.problems  # says itself which key and file is to blame
    except (ImportError, JavaMissing, OSError, ValueError, RecursionError) as error:
        why = f"has no tasks: {error}; allowed: an environment that has some"
    except (EnvFailure, WorkerStartError) as error:
        why = f"does not open: {error}; allowed: an environment that opens"
    return [], [f"{name} {why}; fix: docs/environments.md"]


def _counted(cfg: PPOConfig, envs: EnvironmentManagerBase) -> Counts:
    """How many tasks there are; those of the panel are made where the settings do not tell."""
    if envs.split == "val":
        return {"val_tasks": len(envs.panel)}
    if plays_files(cfg):
        return {}  # counted once they are measured
    if declared_tasks(cfg.env, "val") is not None:
        return {"train_tasks": len(envs.tasks)}
    panel = EnvironmentManagerBase(cfg, "val").panel
    return {"train_tasks": len(envs.tasks), "val_tasks": len(panel)}


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
