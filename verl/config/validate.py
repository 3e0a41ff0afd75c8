"""Entry point of the checks of ``verl.config.checks``, which compare several config keys."""

import contextlib
from collections.abc import Callable
from typing import Any

from verl.config.checks import batch_sizes, losses, models, no_effect, run_and_env
from verl.config.devices import check_devices
from verl.config.load import guess_device
from verl.config.plugins import METHOD_PLUGINS
from verl.config.problems import CheckContext, Problems, RegisteredNames
from verl.config.registered_names import check_estimator_columns, check_names
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.settings import MissingKeyError, Problem

Check = Callable[[Any, CheckContext], Problems]  # the first argument is the config
PPO_CHECKS: tuple[Check, ...] = (
    no_effect.check_data_files,
    no_effect.refuse_keys_without_effect,
    no_effect.check_dependent_keys,
    models.check_model,
    models.check_lora,
    models.check_reward_model,
    check_names,
    models.check_estimator,
    models.check_turn_rewards,
    check_estimator_columns,
    batch_sizes.check_row_lengths,
    batch_sizes.check_batches,
    losses.check_losses,
    losses.check_rollout_overlap,
    losses.check_rollout_correction,
    losses.check_gdpo,
    batch_sizes.check_sampling,
    batch_sizes.check_greedy_validation_samples,
    check_devices,
    run_and_env.check_env,
    run_and_env.check_ray_resources,
    run_and_env.check_run_settings,
)
SFT_CHECKS: tuple[Check, ...] = (
    no_effect.refuse_keys_without_effect,
    models.check_sft,
    run_and_env.check_env,
    run_and_env.check_run_settings,
)


def find_problems(
    cfg: PPOConfig | SFTConfig,
    names: RegisteredNames | None = None,
    check_files: bool = True,
    lacks_invalid_keys: bool = False,
) -> list[Problem]:
    """Return the messages of all checks on ``cfg``, in which derived values are filled in.

    If ``names`` is None, only built-in names are valid, and names of environments are not checked.
    With ``check_files``, files that the config names must exist. With ``lacks_invalid_keys``,
    ``cfg`` lacks refused keys, and a check that reads one stops without a message.
    """
    device = "cpu"  # if the device was refused, check for CPU until it is corrected
    with contextlib.suppress(MissingKeyError):
        device = cfg.trainer.device
    ctx = CheckContext(names or RegisteredNames(), check_files, guess_device(device))
    messages: list[Problem] = []
    checks = PPO_CHECKS if isinstance(cfg, PPOConfig) else SFT_CHECKS
    for check in (*checks, *(plugin.check for plugin in METHOD_PLUGINS)):
        try:
            # Append messages one by one, to keep those that a check yields before MissingKeyError.
            for message in check(cfg, ctx):
                messages.append(message)
        except MissingKeyError:
            if not lacks_invalid_keys:
                raise
    return messages
