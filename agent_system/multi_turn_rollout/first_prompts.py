"""First prompts of tasks: check of their tokens, and treatment of prompts that are too long.

tasks ──▶ chat template ──▶ tokens ──▶ at most data.max_prompt_length: kept
                                 └───▶ longer: filter_overlong_prompts   dropped
                                               truncation=error          refused
                                               truncation=left, ...      text cut and checked again
"""

import logging
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from agent_system.environments.env import Observation, Task
from agent_system.environments.env_registry import get_package
from agent_system.environments.manager import EnvironmentManagerBase
from agent_system.environments.package import TaskText
from agent_system.multi_turn_rollout.collector_worker import PolicyTokenizer
from agent_system.multi_turn_rollout.history import make_history
from agent_system.multi_turn_rollout.rollout_settings import RolloutSettings
from agent_system.tokens.bridge import ChatBridge
from agent_system.tokens.conversation import TokenConversation
from agent_system.tokens.probe import check_first_prompt, check_next_turn
from verl.config.schema import PPOConfig
from verl.utils.chat_template import Message

logger = logging.getLogger(__name__)
LIMIT_KEY = "data.max_prompt_length"
JOINER = "\u200d"  # zero-width joiner: combines its neighbours into one character
MAX_CUTS = 8  # attempts per text: a shortened text may be encoded to more tokens than expected


def collect_first_observations(envs: EnvironmentManagerBase, tasks: int) -> list[Observation]:
    """Return the first observation of each of the first ``tasks`` training tasks.

    Raises ``EnvFailure`` and ``WorkerStartError`` from the environment.
    """
    batch = envs.gen_batch(1, min(tasks, len(envs.task_list)))
    # The members of a group have the same start state: one of them is enough.
    batch = batch[:: envs.group_size]
    try:
        observations, infos = envs.reset(batch)
    finally:
        envs.close()
    texts, images, anchors = (observations[name] for name in ("text", "image", "anchor"))
    columns = (texts, images, anchors, infos, observations["opening"])
    return [Observation(*fields) for fields in zip(*columns, strict=True)]


def measure_first_prompts(
    config: PPOConfig, tokenizer: PolicyTokenizer, observations: Sequence[Observation]
) -> list[int]:
    """Return the token count of the first prompt for each of ``observations``.

    ``config`` is the whole typed configuration. Raises ``TemplateUnsupported``.
    """
    return [
        len(conversation.prompt_ids)
        for _, _, conversation in _open_conversations(config, tokenizer, observations)
    ]


def check_first_tokens(
    config: PPOConfig, tokenizer: PolicyTokenizer, observations: Sequence[Observation]
) -> None:
    """Check that first prompts have the same tokens as ``apply_chat_template``.

    Checks the prompts with all ``observations``. With ``append`` history it also checks the tokens
    around the next turn, for the first observation. Raises ``TemplateUnsupported`` if they differ.
    """
    for prompt_index, (bridge, messages, _) in enumerate(
        _open_conversations(config, tokenizer, observations)
    ):
        check_first_prompt(bridge, messages)
        if prompt_index == 0 and config.env.history == "append":
            check_next_turn(bridge, messages)


def _open_conversations(
    config: PPOConfig, tokenizer: PolicyTokenizer, observations: Sequence[Observation]
) -> Iterator[tuple[ChatBridge, list[Message], TokenConversation]]:
    """Yield template encoder, messages and tokens of the first prompt for each observation."""
    package = get_package(config.env.env_name)
    settings = RolloutSettings.from_config(config, package, is_train=True)
    unlimited = replace(settings, max_prompt_length=sys.maxsize)
    prompts = settings.build_prompts(package, config.env)
    bridge = ChatBridge(tokenizer, config.data.apply_chat_template_kwargs)
    for observation in observations:
        history = make_history(unlimited, bridge, prompts)
        dialogue = history.open_turn(observation, 0)
        if dialogue is not None:
            yield bridge, dialogue.messages, dialogue.conversation


class PromptsTooLong(ValueError):
    """Error of prompts longer than ``data.max_prompt_length``."""


def fit_prompts(
    config: PPOConfig, tokenizer: PolicyTokenizer, envs: EnvironmentManagerBase
) -> None:
    """Drop, shorten or refuse the tasks of ``envs`` whose first prompt is too long.

    Applies only to environments whose tasks contain the text of the first observation. Raises
    ``PromptsTooLong`` where long prompts are refused, and where no task is left.
    """
    text = envs.package.task_text
    if text is None:
        return
    limit = config.data.max_prompt_length
    observations = [text.first_observation(task) for task in envs.task_list]
    lengths = measure_first_prompts(config, tokenizer, observations)
    num_longer = sum(length > limit for length in lengths)
    if not num_longer:
        return
    if config.data.filter_overlong_prompts:
        kept_tasks = [task for task, n in zip(envs.task_list, lengths, strict=True) if n <= limit]
        action = "drop"
    elif config.data.truncation == "error":
        raise PromptsTooLong(_refusal_message(config, envs.split, lengths))
    else:
        kept_tasks = [
            task if n <= limit else shorten_task(config, tokenizer, text, task, n)
            for task, n in zip(envs.task_list, lengths, strict=True)
        ]
        action = f"shorten ({config.data.truncation})"
    if not kept_tasks:
        raise PromptsTooLong(_refusal_message(config, envs.split, lengths))
    logger.warning(
        "prompts of more than %d tokens in %d of %d %s rows; action: %s",
        limit,
        num_longer,
        len(lengths),
        "training" if envs.split == "train" else "validation",
        action,
    )
    envs.replace_tasks(kept_tasks)


def shorten_task(
    config: PPOConfig, tokenizer: PolicyTokenizer, text: TaskText, task: Task, length: int
) -> Task:
    """Return ``task``, whose prompt has ``length`` tokens, with its last text cut to fit.

    Raises ``PromptsTooLong`` where the rest of the prompt is too long already.
    """
    limit = config.data.max_prompt_length
    for _ in range(MAX_CUTS):
        shorter_text = cut_text(
            tokenizer, text.first_observation(task).text, length - limit, config.data.truncation
        )
        if not shorter_text:
            break
        task = text.with_text(task, shorter_text)
        (length,) = measure_first_prompts(config, tokenizer, [text.first_observation(task)])
        if length <= limit:
            return task
    raise PromptsTooLong(
        f"{LIMIT_KEY}={limit}: the prompt of {task['task_id']} has more tokens even without its "
        f"last text; allowed: at least the tokens of the rest; fix: {LIMIT_KEY}={length}"
    )


def cut_ids(ids: Sequence[int], surplus: int, side: str) -> list[int]:
    """Return ``ids`` without ``surplus`` of them, removed at the ``left``, ``right`` or ``middle``.

    cut_ids([1, 2, 3, 4], 2, "middle") == [1, 4]
    """
    keep = max(0, len(ids) - surplus)
    head = {"left": 0, "right": keep, "middle": keep // 2}[side]
    return [*ids[:head], *ids[len(ids) - (keep - head) :]]


def cut_text(tokenizer: PolicyTokenizer, text: str, surplus: int, side: str) -> str:
    """Return ``text`` without the characters of ``surplus`` tokens, removed at ``side``.

    A character that is partly in a removed token is removed as a whole, with its accents.
    """
    spans = _token_spans(tokenizer, text)
    kept_tokens = cut_ids(range(len(spans)), surplus, side)
    dropped_tokens = sorted(set(range(len(spans))).difference(kept_tokens))
    if not kept_tokens or not dropped_tokens:
        return "" if dropped_tokens else text
    first_dropped, last_dropped = dropped_tokens[0], dropped_tokens[-1]
    # If a character is split over several tokens, the span of each is the whole character.
    begin = min(spans[first_dropped - 1][1], spans[first_dropped][0]) if first_dropped else 0
    end = spans[last_dropped][1] if last_dropped < len(spans) - 1 else len(text)
    while _continues_character(text, begin):
        begin -= 1
    while _continues_character(text, end):
        end += 1
    return text[:begin] + text[end:]


def _continues_character(text: str, at: int) -> bool:
    """Return true if the character at index ``at`` is part of the one before it."""
    if not 0 < at < len(text):
        return False
    return JOINER in text[at - 1 : at + 1] or unicodedata.category(text[at]).startswith("M")


def _token_spans(tokenizer: PolicyTokenizer, text: str) -> list[tuple[int, int]]:
    """Return the character range ``(start, end)`` of each token of ``text``."""
    if getattr(tokenizer, "is_fast", False):
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(encoded["offset_mapping"])
    # Slow tokenizers have no offsets: assume tokens of equal length.
    count = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    edges = [token_index * len(text) // max(1, count) for token_index in range(count + 1)]
    return list(pairwise(edges))


def _refusal_message(config: PPOConfig, split: str, lengths: Sequence[int]) -> str:
    limit = config.data.max_prompt_length
    max_len = max(lengths)
    num_longer = sum(length > limit for length in lengths)
    filtered = "" if num_longer == len(lengths) else ", or data.filter_overlong_prompts=true"
    return (
        f"{LIMIT_KEY}={limit}: the prompts of {num_longer} of {len(lengths)} rows of "
        f"data.{split}_files are longer; the longest has {max_len} tokens; allowed: {max_len} or "
        f"more; fix: {LIMIT_KEY}={max_len}{filtered}"
    )
