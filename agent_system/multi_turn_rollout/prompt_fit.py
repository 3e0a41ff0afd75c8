"""Tasks whose prompt is longer than ``data.max_prompt_length``: left out, shortened, or refused.

tasks ──▶ chat template ──▶ tokens ──▶ fits: kept
                                 └───▶ longer: filter_overlong_prompts   left out
                                               truncation=error          refused
                                               truncation=left, ...      text cut, and again
"""

import logging
from collections.abc import Sequence

from agent_system.config import CollectorConfig
from agent_system.environments.base import Task, TaskText
from agent_system.environments.manager import EnvironmentManagerBase
from agent_system.multi_turn_rollout.collector_worker import PolicyTokenizer
from agent_system.multi_turn_rollout.first_prompts import first_prompt_lengths

logger = logging.getLogger(__name__)
LIMIT = "data.max_prompt_length"
CUTS = 8  # of one text: what is left may become more tokens than were counted


class PromptsTooLong(ValueError):
    """Prompts do not fit; the message has key, value, allowed and fix."""


def fit_prompts(
    config: CollectorConfig, tokenizer: PolicyTokenizer, envs: EnvironmentManagerBase
) -> None:
    """Have ``envs`` play tasks whose prompt fits, where the tasks themselves say what they show
    first; other environments stay as they are.

    Raises ``PromptsTooLong`` where rows are to be refused, and where none is left.
    """
    text = envs.package.task_text
    if text is None:
        return
    limit = config.data.max_prompt_length
    lengths = first_prompt_lengths(config, tokenizer, [text.shows(task) for task in envs.tasks])
    longer = sum(length > limit for length in lengths)
    if not longer:
        return
    if config.data.filter_overlong_prompts:
        kept = [task for task, n in zip(envs.tasks, lengths, strict=True) if n <= limit]
        what = "left out"
    elif config.data.truncation == "error":
        raise PromptsTooLong(_refusal(config, envs.split, lengths))
    else:
        kept = [
            task if n <= limit else shortened(config, tokenizer, text, task, n)
            for task, n in zip(envs.tasks, lengths, strict=True)
        ]
        what = f"cut ({config.data.truncation})"
    if not kept:
        raise PromptsTooLong(_refusal(config, envs.split, lengths))
    logger.warning(
        "%d of %d rows to %s on %s: prompts of more than %d tokens",
        longer,
        len(lengths),
        "train" if envs.split == "train" else "validate",
        what,
        limit,
    )
    envs.take(kept)


def shortened(
    config: CollectorConfig, tokenizer: PolicyTokenizer, text: TaskText, task: Task, length: int
) -> Task:
    """``task``, whose prompt has ``length`` tokens, with as many tokens cut from its last text as
    are too many. Raises ``PromptsTooLong`` where the rest of the prompt is too long already.
    """
    limit = config.data.max_prompt_length
    for _ in range(CUTS):
        ids = list(tokenizer(text.shows(task).text, add_special_tokens=False)["input_ids"])
        left = cut(ids, length - limit, config.data.truncation)
        if not left:
            break
        task = text.retold(task, tokenizer.decode(left))
        (length,) = first_prompt_lengths(config, tokenizer, [text.shows(task)])
        if length <= limit:
            return task
    raise PromptsTooLong(
        f"{LIMIT}={limit}: of {task['task_id']} all but the last text has more tokens; allowed: "
        f"room for it; fix: {LIMIT}={length}"
    )


def cut(ids: Sequence[int], surplus: int, side: str) -> list[int]:
    """``ids`` without ``surplus`` of them: the first (``left``), the last (``right``), or those in
    the ``middle``.
    """
    keep = max(0, len(ids) - surplus)
    head = {"left": 0, "right": keep, "middle": keep // 2}[side]
    return [*ids[:head], *ids[len(ids) - (keep - head) :]]


def _refusal(config: CollectorConfig, split: str, lengths: Sequence[int]) -> str:
    limit = config.data.max_prompt_length
    longest = max(lengths)
    longer = sum(length > limit for length in lengths)
    filtered = "" if longer == len(lengths) else ", or data.filter_overlong_prompts=true"
    return (
        f"{LIMIT}={limit}: the prompts of {longer} of {len(lengths)} rows of data.{split}_files "
        f"are longer; the longest has {longest} tokens; allowed: {longest} or more; "
        f"fix: {LIMIT}={longest}{filtered}"
    )
