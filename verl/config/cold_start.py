"""Config of the cold start: the supervised run that trains the policy if it does not exist."""

from verl.config.load import load_config
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.settings import ConfigError

DEFAULT_SFT_CONFIG = "quickstart_sft"


def get_cold_start_config_name(cfg: PPOConfig) -> str:
    """Return the name of the config of ``main_sft`` that trains a missing policy."""
    return cfg.cold_start.config_name or DEFAULT_SFT_CONFIG


def build_cold_start_config(cfg: PPOConfig) -> SFTConfig:
    """Return the config of ``main_sft`` that trains the policy ``actor_rollout_ref.model.path``.

    Environment, device and chat template arguments are those of ``cfg``. Raises ``ConfigError`` if
    the config cannot be composed.
    """
    # Refuse overrides of env.* and model.save_path: the values of ``cfg`` would replace them.
    conflicting_overrides = [
        override
        for override in cfg.cold_start.overrides
        if override.lstrip("+").startswith(("env.", "model.save_path="))
    ]
    if conflicting_overrides:
        raise ConfigError(
            f"cold_start.overrides={conflicting_overrides!r}: taken from this run; "
            "allowed: keys other than env.* and model.save_path; "
            "fix: set env.* and actor_rollout_ref.model.path of this run instead",
            "conflicting_keys",
        )
    # Runs of two projects must not share the directory of the cold start. This override is the
    # first one, so that the overrides of the cold start can replace it.
    project_override = f'trainer.project_name="{cfg.trainer.project_name}"'
    sft_config = load_config(
        get_cold_start_config_name(cfg), [project_override, *cfg.cold_start.overrides], SFTConfig
    )
    return sft_config.with_values(
        {
            "env": cfg.env,
            "env.compact.enable": False,  # demonstrations have no summaries
            # Use the chat template of the rollouts, so that the policy trains on the same tokens.
            "data.apply_chat_template_kwargs": cfg.data.apply_chat_template_kwargs,
            "model.save_path": str(cfg.actor_rollout_ref.model.path),
            "trainer.device": cfg.trainer.device,
        }
    )
