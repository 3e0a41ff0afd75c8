"""Settings of rollouts for collector workers, read from the configuration once."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypedDict

from agent_system.environments.env import Prompts, shows_level_prompts
from agent_system.environments.env_registry import get_package, read_env_settings
from agent_system.environments.package import EnvPackage
from agent_system.tokens.conversation import TokenLimits
from rlvcr.levels import merge_level_prompts
from rlvcr.research.level_rules import FREE_RULE, LevelRule
from rlvcr.settings import RLVCRSettings, get_rlvcr_settings
from verl.config.schema import PPOConfig
from verl.config.schema.actor_rollout_ref import RolloutConfig, ValSamplingConfig
from verl.config.schema.env import EnvCompaction, EnvConfig
from verl.names import BASE_MODEL, POLICY_MODEL, History


class SamplingValues(TypedDict):
    """Sampling parameters of the engines. Temperature 0 means greedy sampling."""

    temperature: float
    top_p: float
    top_k: int


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """Settings of rollouts: turn and token limits, sampling parameters, and thinking levels.

    ``max_response_length`` limits a row's response: the whole episode after the first prompt
    (``append``) or one turn (``window``). ``requests_levels``: prompts ask for thinking levels.
    ``level_prompts`` replaces descriptions of some levels. ``alternatives_settings`` is None if
    RLVCR samples no alternative thoughts (at other levels). ``level_rule`` can force the level of a
    turn. The sampling seed of a turn is derived from ``seed``, trajectory and turn. For every row
    of the task batch, ``trajectories_per_row`` trajectories are generated. ``compact`` is None if
    the policy writes no summaries of earlier turns. ``training_values`` are the sampling parameters
    of training, also in the settings of validation.
    """

    history: History
    history_length: int
    max_steps: int
    max_turn_tokens: int
    max_prompt_length: int
    max_response_length: int
    requests_levels: bool
    temperature: float
    top_p: float
    top_k: int
    stop: tuple[str, ...]
    alternatives_settings: RLVCRSettings | None = None  # None: no alternative thoughts
    trajectories_per_row: int = 1
    level_prompts: Mapping[int, str] = field(default_factory=dict)
    level_rule: LevelRule = FREE_RULE
    seed: int = 0
    models: tuple[str, ...] = (POLICY_MODEL,)  # models that an agent can request by name
    compact: EnvCompaction | None = None
    # Sampling parameters of training, also if these settings are for validation.
    training_values: Mapping[str, object] = field(default_factory=dict)

    @property
    def token_limits(self) -> TokenLimits:
        """Token limits of one conversation; every conversation becomes one row."""
        return TokenLimits(
            max_prompt=self.max_prompt_length,
            max_response=self.max_response_length,
            max_turn=self.max_turn_tokens,
        )

    @classmethod
    def from_config(
        cls,
        config: PPOConfig,
        package: EnvPackage,
        is_train: bool,
        samples_alternatives: bool = False,
    ) -> "RolloutSettings":
        """Read ``config`` for training or validation.

        ``samples_alternatives`` enables alternative thoughts according to ``algorithm.rlvcr``.
        """
        rollout_config = config.actor_rollout_ref.rollout
        rlvcr = get_rlvcr_settings(config.algorithm)
        sampling_config = rollout_config if is_train else rollout_config.val_kwargs
        max_turn_tokens = config.env.max_turn_tokens or config.data.max_response_length
        return cls(
            trajectories_per_row=1 if is_train else rollout_config.val_kwargs.n,
            history=config.env.history,
            history_length=config.env.history_length,
            max_steps=config.env.max_steps,
            max_turn_tokens=max_turn_tokens,
            max_prompt_length=config.data.max_prompt_length,
            max_response_length=config.data.max_response_length,
            requests_levels=should_request_levels(config),
            **_read_sampling_values(sampling_config),
            stop=package.stop_strings(read_env_settings(config.env)),
            alternatives_settings=rlvcr if samples_alternatives else None,
            level_prompts=merge_level_prompts(rlvcr.prompts, {}),
            # Force random levels in training only: validation measures the policy's own choice.
            level_rule=LevelRule.from_uniform_share(rlvcr.epsilon_levels)
            if samples_alternatives
            else FREE_RULE,
            seed=rollout_config.seed,
            models=list_engine_model_names(config),
            compact=config.env.compact if config.env.compact.enable else None,
            training_values=_read_sampling_values(rollout_config),
        )

    def build_prompts(self, package: EnvPackage, env_config: EnvConfig) -> Prompts:
        """Return the prompts of the environment ``package``.

        The texts in ``level_prompts`` replace the descriptions of thinking levels in them.
        """
        settings = read_env_settings(env_config)
        if self.level_prompts:
            settings = settings.model_copy(update={"level_prompts": dict(self.level_prompts)})
        return package.prompts(settings)


def _read_sampling_values(config: RolloutConfig | ValSamplingConfig) -> SamplingValues:
    return SamplingValues(
        temperature=config.temperature if config.do_sample else 0.0,
        top_p=config.top_p,
        top_k=config.top_k,
    )


def list_engine_model_names(config: PPOConfig) -> tuple[str, ...]:
    """Return the names of the models that clients can request from the engines.

    If LoRA adapters are synced, they include the base model and the adapters that are not trained.
    """
    policy_config = config.actor_rollout_ref
    if policy_config.rollout.lora_sync != "adapter":
        return (POLICY_MODEL,)
    return (POLICY_MODEL, BASE_MODEL, *policy_config.model.adapters)


def should_request_levels(config: PPOConfig) -> bool:
    """Return True if the prompts must ask the policy for a thinking level in every turn.

    If ``env.levels`` is null, levels are requested if RLVCR is enabled.
    """
    requests_levels: bool | None = config.env.levels
    return (
        bool(get_rlvcr_settings(config.algorithm).enable)
        if requests_levels is None
        else requests_levels
    )


def check_level_prompts(config: PPOConfig, package: EnvPackage) -> None:
    """Check that the environment's prompts support thinking levels if the config requests them.

    Raises ``ValueError`` if they do not ask for a level, or do not show the descriptions of levels
    in ``algorithm.rlvcr.prompts``.
    """
    if not should_request_levels(config):
        return
    prompts = package.prompts(read_env_settings(config.env))
    env_text = f"env.env_name={config.env.env_name!r}"
    if not prompts.asks_for_levels:
        raise ValueError(
            f"{env_text}: its prompts do not request thinking levels, and env.levels is true; "
            "allowed: an environment whose prompts have asks_for_levels=True; fix: another "
            "environment, or algorithm.adv_estimator=grpo with algorithm.rlvcr.enable and "
            "env.levels unset"
        )
    level_texts = get_rlvcr_settings(config.algorithm).prompts
    if level_texts and not shows_level_prompts(prompts):
        raise ValueError(
            f"algorithm.rlvcr.prompts={level_texts!r}: the prompts of {env_text} describe no "
            "levels, so the texts have no effect; allowed: {}; fix: remove them, or use prompts "
            "that describe the levels (env.alfworld.prompt=full)"
        )


def check_compaction(config: PPOConfig, package: EnvPackage) -> None:
    """Raise ``ValueError`` if ``env.compact`` enables summaries that ``package`` does not support.

    An agent behind the endpoint does not support them, because it chooses its messages itself.
    Observations with images do not, because a summary contains no images.
    """
    if not config.env.compact.enable:
        return
    setting_text = f"env.compact.enable=true: env.env_name={config.env.env_name!r}"
    settings = read_env_settings(config.env)
    weight_by_part = package.part_weights(settings)
    if package.runs_agent or any(get_package(name).runs_agent for name in weight_by_part):
        raise ValueError(
            f"{setting_text} runs an agent, which decides itself which messages it sends to the "
            "endpoint; allowed: false; fix: env.compact.enable=false, and let the agent summarise"
        )
    if package.images(settings) is not None:
        raise ValueError(
            f"{setting_text} shows images, which a summary does not contain; allowed: observations "
            "of text; fix: env.compact.enable=false"
        )


def refuse_images(config: PPOConfig) -> None:
    """Raise ``ValueError`` if the environment shows images, which a text policy cannot read."""
    image_setting = get_package(config.env.env_name).images(read_env_settings(config.env))
    if image_setting is None:
        return
    key, value, value_for_text = image_setting
    full_key = f"env.{config.env.env_name.split('/', 1)[0]}.{key}"
    policy_path = config.actor_rollout_ref.model.path
    raise ValueError(
        f"{full_key}={value!r}: its observations are images, and the policy {policy_path} is used "
        f"as a text model; allowed: {value_for_text}; fix: {full_key}={value_for_text}"
    )
