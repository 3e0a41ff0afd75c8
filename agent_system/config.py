"""What is read here of a run's typed configuration, as protocols.

The fields are described where they are set: ``python -m verl.trainer.main_ppo --help SECTION``.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import rlvcr.config
from rlvcr.names import LevelRuleName


class SamplingConfig(Protocol):
    """How tokens are drawn; ``do_sample`` false is greedy."""

    @property
    def do_sample(self) -> bool: ...

    @property
    def temperature(self) -> float: ...

    @property
    def top_p(self) -> float: ...

    @property
    def top_k(self) -> int: ...


class ValSamplingConfig(SamplingConfig, Protocol):
    """How tokens are drawn in validation; every task is played ``n`` times."""

    @property
    def n(self) -> int: ...


class RolloutConfig(SamplingConfig, Protocol):
    """How tokens are drawn in training."""

    @property
    def seed(self) -> int: ...

    @property
    def val_kwargs(self) -> ValSamplingConfig: ...


class ModelConfig(Protocol):
    """Where the policy comes from."""

    @property
    def path(self) -> str | None: ...

    @property
    def external_lib(self) -> str | None: ...


class ActorConfig(Protocol):
    """What an invalid action costs."""

    @property
    def use_invalid_action_penalty(self) -> bool: ...

    @property
    def invalid_action_penalty_coef(self) -> float: ...


class PolicyConfig(Protocol):
    """``actor_rollout_ref``."""

    @property
    def model(self) -> ModelConfig: ...

    @property
    def actor(self) -> ActorConfig: ...

    @property
    def rollout(self) -> RolloutConfig: ...


class GroupConfig(Protocol):
    """``env.rollout``: the group size, and how many groups may go on over steps."""

    @property
    def n(self) -> int: ...

    @property
    def carry_over(self) -> int: ...

    @property
    def carry_over_steps(self) -> int: ...


class EnvConfig(Protocol):
    """``env``; times in seconds. ``env_settings`` reads the settings of the environment itself."""

    @property
    def env_name(self) -> str: ...

    @property
    def seed(self) -> int: ...

    @property
    def max_steps(self) -> int: ...

    @property
    def history(self) -> str: ...

    @property
    def history_length(self) -> int: ...

    @property
    def max_turn_tokens(self) -> int | None: ...

    @property
    def kwargs(self) -> Mapping[str, Any]: ...

    @property
    def rollout(self) -> GroupConfig: ...

    @property
    def num_workers(self) -> int: ...

    @property
    def envs_per_worker(self) -> int: ...

    @property
    def reset_timeout_s(self) -> float: ...

    @property
    def step_timeout_s(self) -> float: ...

    @property
    def on_abort(self) -> str: ...

    @property
    def num_collectors(self) -> int: ...

    @property
    def train_tasks(self) -> int | None: ...

    @property
    def val_tasks(self) -> int | None: ...

    @property
    def allow_retokenized(self) -> bool: ...


class DataConfig(Protocol):
    """``data``: lengths in tokens."""

    @property
    def max_prompt_length(self) -> int: ...

    @property
    def max_response_length(self) -> int: ...

    @property
    def shuffle(self) -> bool: ...

    @property
    def filter_overlong_prompts(self) -> bool: ...

    @property
    def truncation(self) -> str: ...

    @property
    def apply_chat_template_kwargs(self) -> dict[str, Any]: ...


class FilterGroupsConfig(Protocol):
    """``algorithm.filter_groups``: new tasks until enough groups have returns that differ."""

    @property
    def enable(self) -> bool: ...

    @property
    def max_num_gen_batches(self) -> int: ...


class AlgorithmConfig(Protocol):
    """``algorithm``, without what is plugged into it; see ``with_method``."""

    @property
    def adv_estimator(self) -> str: ...

    @property
    def filter_groups(self) -> FilterGroupsConfig: ...


class RewardModelConfig(Protocol):
    """``reward_model``: which manager, and what it is made with."""

    @property
    def reward_manager(self) -> str: ...

    @property
    def reward_kwargs(self) -> dict[str, Any]: ...

    @property
    def weights(self) -> Mapping[str, float]: ...


class CustomRewardConfig(Protocol):
    """``custom_reward_function``: a function of the user's own, none where ``path`` is empty."""

    @property
    def path(self) -> str | None: ...

    @property
    def name(self) -> str: ...

    @property
    def reward_kwargs(self) -> dict[str, Any]: ...

    @property
    def timeout_s(self) -> float: ...


@runtime_checkable
class GradesAnswers(Protocol):
    """The settings of an environment that is handed keys of the configuration, the function that
    grades answers among them.
    """

    @property
    def data_keys(self) -> Mapping[str, str]: ...


class GradedEnvConfig(Protocol):
    """``env``: whether it grades answers itself."""

    @property
    def settings(self) -> object: ...


class TasksConfig(Protocol):
    """What the environment manager reads."""

    @property
    def env(self) -> EnvConfig: ...

    @property
    def data(self) -> DataConfig: ...


class RewardConfig(Protocol):
    """What the reward manager reads."""

    @property
    def actor_rollout_ref(self) -> PolicyConfig: ...

    @property
    def reward_model(self) -> RewardModelConfig: ...

    @property
    def custom_reward_function(self) -> CustomRewardConfig: ...

    @property
    def env(self) -> GradedEnvConfig: ...


class ModelRewardConfig(Protocol):
    """``reward_model``: whether a model scores plays."""

    @property
    def enable(self) -> bool: ...


class CollectorConfig(TasksConfig, Protocol):
    """What the collector reads."""

    @property
    def reward_model(self) -> ModelRewardConfig: ...

    @property
    def actor_rollout_ref(self) -> PolicyConfig: ...

    @property
    def algorithm(self) -> AlgorithmConfig: ...


class ThinkingConfig(rlvcr.config.ThinkingConfig, Protocol):
    """``algorithm.rlvcr``: what the method reads, and what playing needs besides."""

    @property
    def enable(self) -> bool | None: ...

    @property
    def prompts(self) -> Mapping[Any, str]: ...

    @property
    def epsilon_levels(self) -> float: ...

    @property
    def executed_share(self) -> float: ...

    @property
    def audit_points(self) -> int: ...

    @property
    def audit_plays(self) -> int: ...

    @property
    def eval_levels(self) -> Sequence[LevelRuleName]: ...

    @property
    def collapse_patience(self) -> int: ...


class AlgorithmWithMethod(AlgorithmConfig, Protocol):
    """``algorithm`` with the section of the method."""

    @property
    def rlvcr(self) -> ThinkingConfig: ...


class EnvWithMethod(EnvConfig, Protocol):
    """``env`` with the key of the method."""

    @property
    def levels(self) -> bool | None: ...


class ConfigWithMethod(CollectorConfig, Protocol):
    """What the collector reads, the method's keys included."""

    @property
    def env(self) -> EnvWithMethod: ...

    @property
    def algorithm(self) -> AlgorithmWithMethod: ...


def with_method(config: CollectorConfig) -> ConfigWithMethod:
    """``config``, whose ``algorithm.rlvcr`` and ``env.levels`` may be read."""
    # The method plugs its keys in when a run starts: the schema, which checkers see, has none.
    plugged: Any = config
    return plugged
