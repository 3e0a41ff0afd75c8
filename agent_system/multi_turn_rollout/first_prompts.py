"""Checks of the first prompts of tasks before a rollout: number of tokens, and chat template."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from agent_system.environments.env import Observation
from agent_system.environments.env_registry import get_package
from agent_system.environments.manager import EnvironmentManagerBase
from agent_system.multi_turn_rollout.collector_worker import PolicyTokenizer
from agent_system.multi_turn_rollout.history import make_history
from agent_system.multi_turn_rollout.rollout_settings import RolloutSettings
from agent_system.tokens.bridge import ChatBridge
from agent_system.tokens.conversation import TokenConversation
from agent_system.tokens.probe import check_first_prompt, check_next_turn
from verl.config.schema import PPOConfig
from verl.utils.chat_template import Message


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
    columns = (
        observations["text"],
        observations["image"],
        observations["anchor"],
        infos,
        observations["opening"],
    )
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
        conversation = history.open_turn(observation, 0)
        if conversation is not None:
            yield bridge, history.shown_messages, conversation
