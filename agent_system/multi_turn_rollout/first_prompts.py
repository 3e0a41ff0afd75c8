"""First prompts of tasks: check of their tokens, and treatment of prompts that are too long.

tasks ──▶ chat template ──▶ tokens ──▶ at most data.max_prompt_length: kept
                                 └───▶ longer: filter_overlong_prompts   dropped
                                               truncation=error          refused
                                               truncation=left, ...      text cut and checked again
"""

import logging
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import regex

from agent_system.environments.env import Observation, Task
from agent_system.environments.env_registry import get_package
from agent_system.environments.manager import EnvironmentManagerBase
from agent_system.environments.package import TaskText
from agent_system.multi_turn_rollout.collector_worker import PolicyTokenizer
from agent_system.multi_turn_rollout.history import make_history
from agent_system.multi_turn_rollout.rollout_settings import RolloutSettings
from agent_system.tokens.bridge import ChatBridge
from agent_system.tokens.conversation import TokenConversation
from agent_system.tokens.template_support import check_first_prompt_tokens, check_inter_turn_tokens
from verl.config.schema import PPOConfig
from verl.utils.chat_template import Message

logger = logging.getLogger(__name__)
LIMIT_KEY = "data.max_prompt_length"
# Attempts per text: a shortened text may be encoded to more tokens than expected.
MAX_CUT_ATTEMPTS = 8


def collect_first_observations(envs: EnvironmentManagerBase, num_tasks: int) -> list[Observation]:
    """Return the first observations of the first ``num_tasks`` training tasks."""
    batch = envs.gen_batch(1, min(num_tasks, len(envs.task_list)))
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
    """Return the token count of the first prompt for each of ``observations``."""
    return [
        len(conversation.prompt_ids)
        for _, _, conversation in _build_first_prompts(config, tokenizer, observations)
    ]


def check_template_tokens(
    config: PPOConfig, tokenizer: PolicyTokenizer, observations: Sequence[Observation]
) -> None:
    """Check that first prompts have the same tokens as ``apply_chat_template``.

    With ``append`` history, also check the tokens between the turns of a conversation that begins
    with the first of ``observations``. Raises ``UnsupportedTemplateError`` if tokens differ.
    """
    for prompt_index, (bridge, messages, _) in enumerate(
        _build_first_prompts(config, tokenizer, observations)
    ):
        check_first_prompt_tokens(bridge, messages)
        if prompt_index == 0 and config.env.history == "append":
            check_inter_turn_tokens(bridge, messages)


def _build_first_prompts(
    config: PPOConfig, tokenizer: PolicyTokenizer, observations: Sequence[Observation]
) -> Iterator[tuple[ChatBridge, list[Message], TokenConversation]]:
    """Yield (template encoder, messages, tokens) of the first prompt for each observation."""
    package = get_package(config.env.env_name)
    settings = RolloutSettings.from_config(config, package, is_train=True)
    unlimited_settings = replace(settings, max_prompt_length=sys.maxsize, compact=None)
    prompts = settings.build_prompts(package, config.env)
    bridge = ChatBridge(tokenizer, config.data.apply_chat_template_kwargs)
    for observation in observations:
        history = make_history(unlimited_settings, bridge, prompts)
        dialogue = history.open_turn(observation, 0)
        if dialogue is not None:
            yield bridge, dialogue.messages, dialogue.conversation


class PromptsTooLongError(ValueError):
    """Error for prompts longer than ``data.max_prompt_length``."""


def limit_first_prompts(
    config: PPOConfig, tokenizer: PolicyTokenizer, envs: EnvironmentManagerBase
) -> None:
    """Drop, shorten or refuse the tasks of ``envs`` whose first prompt is too long.

    Applies only to environments whose tasks contain the text of the first observation. Raises
    ``PromptsTooLongError`` if long prompts are refused, or if no task is left.
    """
    task_text = envs.package.task_text
    if task_text is None:
        return
    max_tokens = config.data.max_prompt_length
    observations = [task_text.first_observation(task) for task in envs.task_list]
    lengths = measure_first_prompts(config, tokenizer, observations)
    num_too_long = sum(length > max_tokens for length in lengths)
    if not num_too_long:
        return
    should_drop = config.data.filter_overlong_prompts
    should_shorten = not should_drop and config.data.truncation != "error"
    kept_tasks: list[Task] = []
    for task, length in zip(envs.task_list, lengths, strict=True):
        if length <= max_tokens:
            kept_tasks.append(task)
        elif should_shorten:
            kept_tasks.append(shorten_task(config, tokenizer, task_text, task, length))
    if not kept_tasks or not (should_drop or should_shorten):
        raise PromptsTooLongError(_build_refusal_message(config, envs.split, lengths))
    logger.warning(
        "prompts of more than %d tokens in %d of %d %s rows; action: %s",
        max_tokens,
        num_too_long,
        len(lengths),
        "training" if envs.split == "train" else "validation",
        "drop" if should_drop else f"shorten ({config.data.truncation})",
    )
    envs.replace_tasks(kept_tasks)


def shorten_task(
    config: PPOConfig, tokenizer: PolicyTokenizer, task_text: TaskText, task: Task, length: int
) -> Task:
    """Return ``task`` with a shortened first observation, so that its prompt fits the limit.

    The prompt of ``task`` has ``length`` tokens. Raises ``PromptsTooLongError`` if the prompt is
    too long even without the text of the observation.
    """
    max_tokens = config.data.max_prompt_length
    for _ in range(MAX_CUT_ATTEMPTS):
        text = task_text.first_observation(task).text
        shorter_text = cut_text(tokenizer, text, length - max_tokens, config.data.truncation)
        if not shorter_text:
            break
        task = task_text.with_text(task, shorter_text)
        (length,) = measure_first_prompts(config, tokenizer, [task_text.first_observation(task)])
        if length <= max_tokens:
            return task
    raise PromptsTooLongError(
        f"{LIMIT_KEY}={max_tokens}: the prompt of {task['task_id']} has more tokens even without "
        f"its last text; allowed: at least the tokens of the rest; fix: {LIMIT_KEY}={length}"
    )


def find_dropped_range(count: int, num_removed: int, side: str) -> range:
    """Return the indices to drop of ``count`` tokens at the ``left``, ``right`` or ``middle``.

    Example: ``find_dropped_range(4, 2, "middle")`` returns ``range(1, 3)``.
    """
    num_kept = max(0, count - num_removed)
    start = {"left": 0, "right": num_kept, "middle": num_kept // 2}[side]
    return range(start, start + count - num_kept)


def cut_text(tokenizer: PolicyTokenizer, text: str, num_removed: int, side: str) -> str:
    """Return ``text`` without the characters of ``num_removed`` tokens, cut at ``side``.

    A character that is partly in a removed token is removed as a whole. Characters are extended
    grapheme clusters (Unicode annex 29): letters with accents, joined emoji, flags, line ends.
    """
    token_spans = _compute_token_spans(tokenizer, text)
    dropped_tokens = find_dropped_range(len(token_spans), num_removed, side)
    if len(dropped_tokens) in (0, len(token_spans)):
        return "" if dropped_tokens else text
    first_dropped, last_dropped = dropped_tokens[0], dropped_tokens[-1]
    cut_start, cut_end = 0, len(text)
    # If a character is split over several tokens, the span of each is the whole character.
    if first_dropped > 0:
        cut_start = min(token_spans[first_dropped - 1][1], token_spans[first_dropped][0])
    if last_dropped < len(token_spans) - 1:
        cut_end = token_spans[last_dropped][1]
    grapheme_boundaries = [0, *(match.end() for match in regex.finditer(r"\X", text))]
    cut_start = grapheme_boundaries[bisect_right(grapheme_boundaries, cut_start) - 1]
    cut_end = grapheme_boundaries[bisect_left(grapheme_boundaries, cut_end)]
    return text[:cut_start] + text[cut_end:]


def _compute_token_spans(tokenizer: PolicyTokenizer, text: str) -> list[tuple[int, int]]:
    """Return the character range ``(start, end)`` of each token of ``text``."""
    if getattr(tokenizer, "is_fast", False):
        encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(encoding["offset_mapping"])
    # Slow tokenizers have no offsets: assume tokens of equal length.
    num_tokens = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    token_boundaries = [
        token_index * len(text) // max(1, num_tokens) for token_index in range(num_tokens + 1)
    ]
    return list(pairwise(token_boundaries))


def _build_refusal_message(config: PPOConfig, split: str, lengths: Sequence[int]) -> str:
    max_tokens = config.data.max_prompt_length
    max_length = max(lengths)
    num_too_long = sum(length > max_tokens for length in lengths)
    filter_hint = "" if num_too_long == len(lengths) else ", or data.filter_overlong_prompts=true"
    return (
        f"{LIMIT_KEY}={max_tokens}: the prompts of {num_too_long} of {len(lengths)} rows of "
        f"data.{split}_files are longer; the longest has {max_length} tokens; allowed: "
        f"{max_length} or more; fix: {LIMIT_KEY}={max_length}{filter_hint}"
    )
