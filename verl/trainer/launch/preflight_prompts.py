"""Checks of the tasks and their first prompts before a run starts, which open the environment."""

import json
import logging
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from agent_system.environments.env import EnvFailure, Observation, Prompts, WorkerStartError
from agent_system.environments.env_registry import get_package, read_env_settings
from agent_system.environments.manager import EnvironmentManagerBase, make_envs
from agent_system.environments.tasks import check_disjoint_splits
from agent_system.multi_turn_rollout.collector_worker import PolicyTokenizer
from agent_system.multi_turn_rollout.first_prompts import (
    PromptsTooLongError,
    check_template_tokens,
    collect_first_observations,
    limit_first_prompts,
    measure_first_prompts,
)
from agent_system.multi_turn_rollout.history import count_max_summary_tokens
from agent_system.multi_turn_rollout.rollout_settings import should_request_levels
from agent_system.tokens.bridge import ChatBridge
from verl.config.derive import count_tasks_of_env_section, uses_file_tasks
from verl.config.problems import build_problem
from verl.config.schema import PPOConfig
from verl.config.settings import ConfigError, Problem
from verl.config.settings.errors import get_problem_code, names_fix
from verl.utils.chat_template import UnsupportedTemplateError
from verl.utils.limits import USER_CODE_ERRORS, describe_error, describe_user_line
from verl.utils.waits import log_waiting

logger = logging.getLogger(__name__)
PROMPT_KEY = "data.max_prompt_length"
# Trial call of a function, test of its result, and text of the allowed results.
TextCall = tuple[Callable[[], object], Callable[[object], bool], str]
TaskCounts = dict[str, int]  # number of tasks under the keys train_tasks and val_tasks
MAX_MEASURED_TASKS = 16  # number of tasks whose first prompts are measured


def open_task_environments(cfg: PPOConfig) -> tuple[EnvironmentManagerBase, EnvironmentManagerBase]:
    """Return the environment managers of the training and the validation tasks.

    With ``trainer.val_only`` the manager of validation tasks is returned for both.
    """
    if cfg.trainer.val_only:
        val_envs = EnvironmentManagerBase(cfg, "val")
        return val_envs, val_envs
    return make_envs(cfg)


def find_prompt_problems(
    cfg: PPOConfig, tokenizer: PolicyTokenizer, task_counts: TaskCounts | None = None
) -> Iterator[Problem]:
    """Yield problems of opening the environment, and of first prompts that are too long.

    A trajectory whose prompt exceeds ``data.max_prompt_length`` would be dropped. The numbers of
    tasks are stored in ``task_counts``.
    """
    task_counts = {} if task_counts is None else task_counts
    observations, problems = observe_first_tasks(cfg, task_counts)
    yield from problems
    text_problem = find_prompt_or_parser_problem(cfg, observations)
    if text_problem is not None:
        yield text_problem
        return
    try:
        check_template_tokens(cfg, tokenizer, observations)
    except UnsupportedTemplateError as error:
        yield Problem(
            f"actor_rollout_ref.model.path={cfg.actor_rollout_ref.model.path!r}: {error}; allowed: "
            f"a chat template that supports the prompts of env.env_name={cfg.env.env_name!r}; fix: "
            "put another chat_template.jinja into its directory, or set env.history=window",
            "unsupported_template",
        )
    if uses_file_tasks(cfg) and not problems:
        yield from _find_file_prompt_problems(cfg, tokenizer, task_counts)
        return
    yield from _find_summary_problems(cfg, tokenizer)
    prompt_lengths = measure_first_prompts(cfg, tokenizer, observations)
    longest_prompt = max(prompt_lengths, default=0)
    max_prompt_length = cfg.data.max_prompt_length
    if longest_prompt > max_prompt_length:
        num_too_long = sum(prompt_length > max_prompt_length for prompt_length in prompt_lengths)
        why = (
            f"{num_too_long} of {len(prompt_lengths)} first prompts are longer, so their "
            f"trajectories would be dropped; the longest has {longest_prompt} tokens"
        )
        # Suggest 25% more, in multiples of 64: prompts that were not measured may be longer.
        fix = f"{PROMPT_KEY}={-(-longest_prompt * 5 // 4 // 64) * 64}"
        yield build_problem(cfg, PROMPT_KEY, why, f"{longest_prompt} or more", fix, "does_not_fit")


def find_prompt_or_parser_problem(
    cfg: PPOConfig, observations: Sequence[Observation]
) -> Problem | None:
    """Return a problem of the environment's functions for prompts and actions, or None.

    The functions make the texts of prompts, and parse actions from replies. Mixtures of
    environments are not checked: they select these functions by task.
    """
    package = get_package(cfg.env.env_name)
    if not observations or package.mixture is not None or package.runs_agent:
        return None
    prompts = package.prompts(read_env_settings(cfg.env))
    text_calls = {
        **_list_prompt_calls(cfg, prompts, observations[0]),
        "project('<action>x</action>')": (
            lambda: package.project("<action>x</action>"),
            _is_parsed_action,
            "a tuple (action, is_valid) of a text and a truth value",
        ),
    }
    for call_text, (call, is_valid, allowed) in text_calls.items():
        try:
            returned_value = call()
            fault_text = None if is_valid(returned_value) else f"returned {returned_value!r:.80}"
        except USER_CODE_ERRORS as error:  # boundary to user code
            fault_text = f"raised {describe_error(error):.200}{describe_user_line(error)}"
        if fault_text is not None:
            return Problem(
                f"env.env_name={cfg.env.env_name!r}: the call {call_text} {fault_text}; allowed: "
                f"{allowed}; fix: correct it, see docs/write_environment.md",
                "failed_call",
            )
    return None


def _list_prompt_calls(
    cfg: PPOConfig, prompts: Prompts, first_observation: Observation
) -> dict[str, TextCall]:
    requests_levels = should_request_levels(cfg)
    call_by_text: dict[str, Callable[[], object]] = {
        # No system message (None) is allowed, as is an empty one.
        "prompts.system(levels)": lambda: prompts.system(requests_levels) or ""
    }
    if cfg.env.history == "window":
        call_by_text["prompts.window(first, history, observation, levels)"] = lambda: (
            prompts.window(
                first_observation,
                [(first_observation.text, "x")],
                first_observation,
                requests_levels,
            )
        )
    else:
        call_by_text["prompts.first(observation, levels)"] = lambda: prompts.first(
            first_observation, requests_levels
        )
        if cfg.env.max_steps > 1:
            call_by_text["prompts.turn(observation)"] = lambda: prompts.turn(first_observation)
    return {
        call_text: (call, lambda value: isinstance(value, str), "a text")
        for call_text, call in call_by_text.items()
    }


def _is_parsed_action(value: object) -> bool:
    return (
        isinstance(value, (tuple, list))
        and len(value) == 2
        and isinstance(value[0], str)
        and isinstance(value[1], (int, np.integer, np.bool_))
    )


def _find_summary_problems(cfg: PPOConfig, tokenizer: PolicyTokenizer) -> Iterator[Problem]:
    """Yield a problem if a row is too short for a turn and a summary (``env.compact``)."""
    if not cfg.env.compact.enable:
        return
    chat_bridge = ChatBridge(tokenizer, cfg.data.apply_chat_template_kwargs)
    summary_tokens = count_max_summary_tokens(chat_bridge, cfg.env.compact)
    needed_tokens = cfg.env.max_turn_tokens + summary_tokens
    if needed_tokens > cfg.data.max_response_length:
        why = (
            f"a turn, the instruction of env.compact and the summary have up to {needed_tokens} "
            "tokens, so no turn would fit into a row"
        )
        key = "data.max_response_length"
        allowed = f"{needed_tokens} or more"
        yield build_problem(cfg, key, why, allowed, f"{key}={needed_tokens}", "does_not_fit")


def _find_file_prompt_problems(
    cfg: PPOConfig, tokenizer: PolicyTokenizer, task_counts: TaskCounts
) -> Iterator[Problem]:
    """Yield problems of the prompts in the data files, and store the numbers of tasks."""
    try:
        train_envs, val_envs = open_task_environments(cfg)
        for envs in (train_envs, val_envs):
            limit_first_prompts(cfg, tokenizer, envs)
        task_counts["train_tasks"] = len(train_envs.task_list)
        task_counts["val_tasks"] = len(val_envs.validation_set)
        if not cfg.trainer.val_only:
            _warn_of_shared_prompts(train_envs, val_envs)
    except ConfigError as error:
        yield from error.problems
    except PromptsTooLongError as error:
        yield Problem(str(error), "does_not_fit")
    except ValueError as error:
        yield Problem(str(error), get_problem_code(error, "no_rows"))


def _warn_of_shared_prompts(
    train_envs: EnvironmentManagerBase, val_envs: EnvironmentManagerBase
) -> None:
    train_prompts = {json.dumps(task["messages"]) for task in train_envs.task_list}
    val_prompts = [json.dumps(task["messages"]) for task, _ in val_envs.validation_set]
    num_shared = sum(prompt in train_prompts for prompt in val_prompts)
    if num_shared:
        logger.warning(
            "%d of %d validation prompts are also training prompts (data.train_files, "
            "data.val_files), so validation measures memorised answers too",
            num_shared,
            len(val_prompts),
        )


def observe_first_tasks(
    cfg: PPOConfig, task_counts: TaskCounts
) -> tuple[list[Observation], Sequence[Problem]]:
    """Return the first observation of up to ``MAX_MEASURED_TASKS`` tasks, and problems.

    A problem is that the environment cannot be opened or has no tasks. The numbers of training and
    validation tasks are stored in ``task_counts``.
    """
    try:
        with log_waiting(f"the first tasks of {cfg.env.env_name}", cfg.trainer.waiting_log_s):
            split = "val" if cfg.trainer.val_only else "train"
            envs = EnvironmentManagerBase(cfg, split)
            task_counts |= _count_tasks(cfg, envs)
            num_tasks = min(MAX_MEASURED_TASKS, len(envs.task_list))
            return collect_first_observations(envs, num_tasks), []
    except ConfigError as error:
        return [], error.problems  # its messages name the key and the file
    except (ImportError, OSError, ValueError, RecursionError) as error:
        why = f"has no tasks: {error}"
        allowed, problem_code = "an environment with tasks", get_problem_code(error, "no_rows")
    except (EnvFailure, WorkerStartError) as error:
        why = f"cannot be opened: {error}"
        allowed, problem_code = "an environment that opens", "failed_call"
    if not names_fix(why):
        why += f"; allowed: {allowed}; fix: see docs/environments.md"
    return [], [Problem(f"env.env_name={cfg.env.env_name!r} {why}", problem_code)]


def _count_tasks(cfg: PPOConfig, envs: EnvironmentManagerBase) -> TaskCounts:
    """Return the numbers of training and validation tasks of the environment.

    Creating tasks takes time. So validation tasks are created here only if the environment does not
    declare their number. Return {} for training tasks from files: ``_find_file_prompt_problems``
    counts them.
    """
    if envs.split == "val":
        return {"val_tasks": len(envs.validation_set)}
    if uses_file_tasks(cfg):
        return {}  # tasks from files are counted after their prompts are measured
    if count_tasks_of_env_section(cfg.env, "val") is not None:
        return {"train_tasks": len(envs.task_list)}
    val_envs = EnvironmentManagerBase(cfg, "val")
    check_disjoint_splits(envs.task_list, val_envs.task_list)
    return {"train_tasks": len(envs.task_list), "val_tasks": len(val_envs.validation_set)}
