"""The supervised run that makes a missing policy, as a config: same environment, same device, ready
to hand over.
"""

from verl.config.load import load_config
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.settings import ConfigError

DEFAULT = "quickstart_sft"


def cold_start_name(cfg: PPOConfig) -> str:
    """The name of the config that makes the policy."""
    return cfg.cold_start.config_name or DEFAULT


def cold_start_config(cfg: PPOConfig) -> SFTConfig:
    """The config of ``main_sft`` that writes ``actor_rollout_ref.model.path``, in the environment
    ``cfg`` plays.

    Starts from ``cold_start.config_name`` with ``cold_start.overrides``; environment, seed of
    tasks, arguments of the chat template, device, project and the place the policy goes to are
    taken from ``cfg``. Raises ConfigError when it cannot be composed.
    """
    # What is taken from the run below would overwrite these without a word.
    own = [
        word
        for word in cfg.cold_start.overrides
        if word.lstrip("+").startswith(("env.", "model.save_path="))
    ]
    if own:
        raise ConfigError(
            f"cold_start.overrides={own!r}: taken from this run; "
            "fix: set env.* and model.path of the run"
        )
    # First, so that overrides win: runs of two projects must not share the cold start's directory.
    project = f'trainer.project_name="{cfg.trainer.project_name}"'
    sft = load_config(cold_start_name(cfg), [project, *cfg.cold_start.overrides], SFTConfig)
    return sft.with_values(
        {
            "env": cfg.env,
            # Another template would give other tokens than the policy meets in its rollouts.
            "data.apply_chat_template_kwargs": cfg.data.apply_chat_template_kwargs,
            "model.save_path": str(cfg.actor_rollout_ref.model.path),
            "trainer.device": cfg.trainer.device,
        }
    )
