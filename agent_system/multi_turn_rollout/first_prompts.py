"""How long the first prompts of some tasks are, before anything is played."""

import sys
from collections.abc import Sequence
from dataclasses import replace

from agent_system.config import CollectorConfig
from agent_system.environments.base import Observation
from agent_system.environments.env_registry import get_package
from agent_system.environments.manager import EnvironmentManagerBase
from agent_system.multi_turn_rollout.collector_worker import PolicyTokenizer
from agent_system.multi_turn_rollout.history import make_history
from agent_system.multi_turn_rollout.play_settings import PlaySettings
from agent_system.tokens.bridge import ChatBridge


def first_observations(envs: EnvironmentManagerBase, tasks: int) -> list[Observation]:
    """What the agent sees first in each of the first ``tasks`` tasks of training.

    Raises ``EnvFailure`` and ``WorkerStartError`` from the environment.
    """
    batch = envs.gen_batch(1, min(tasks, len(envs.tasks)))
    # The members of a group start alike: one of each is enough.
    batch = batch[:: envs.group_size]
    try:
        seen, infos = envs.reset(batch)
    finally:
        envs.close()
    columns = (seen["text"], seen["image"], seen["anchor"], infos, seen["opening"])
    return [Observation(*fields) for fields in zip(*columns, strict=True)]


def first_prompt_lengths(
    config: CollectorConfig, tokenizer: PolicyTokenizer, observations: Sequence[Observation]
) -> list[int]:
    """Tokens of the prompt that the policy is shown with each of ``observations`` first.

    ``config`` is the whole typed configuration. Raises ``TemplateUnsupported``.
    """
    package = get_package(config.env.env_name)
    settings = PlaySettings.from_config(config, package, is_train=True)
    unlimited = replace(settings, max_prompt_length=sys.maxsize)
    prompts = settings.prompts(package, config.env)
    bridge = ChatBridge(tokenizer, config.data.apply_chat_template_kwargs)
    lengths = []
    for observation in observations:
        conversation = make_history(unlimited, bridge, prompts).open_turn(observation, 0)
        if conversation is not None:
            lengths.append(len(conversation.prompt_ids))
    return lengths
