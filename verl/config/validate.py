"""Entry point of the checks of ``verl.config.checks``, which compare several config keys.

Each check yields messages with key, value, reason, allowed values and fix.
"""

import contextlib
from collections.abc import Iterator

from verl.config.checks.batch_sizes import (
    check_batches,
    check_lengths,
    check_repeated_validation,
    check_sampling,
)
from verl.config.checks.hardware_and_paths import check_devices, check_env, check_ray, check_run
from verl.config.checks.losses import (
    check_gdpo,
    check_losses,
    check_rollout_correction,
    check_rollout_overlap,
)
from verl.config.checks.models import (
    check_estimator,
    check_lora,
    check_model,
    check_reward_model,
    check_sft,
)
from verl.config.checks.no_effect import (
    check_data_files,
    check_dependent_keys,
    refuse_keys_without_effect,
)
from verl.config.load import guess_device
from verl.config.plugins import METHOD_PLUGINS
from verl.config.problems import CheckContext, Problems, RegisteredNames
from verl.config.registered_names import check_columns, check_names
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.settings import MissingKey

PPO_CHECKS = (
    check_data_files,
    refuse_keys_without_effect,
    check_dependent_keys,
    check_model,
    check_lora,
    check_reward_model,
    check_names,
    check_estimator,
    check_columns,
    check_lengths,
    check_batches,
    check_losses,
    check_rollout_overlap,
    check_rollout_correction,
    check_gdpo,
    check_sampling,
    check_repeated_validation,
    check_devices,
    check_env,
    check_ray,
    check_run,
)
SFT_CHECKS = (refuse_keys_without_effect, check_sft, check_env, check_run)


def find_problems(
    cfg: PPOConfig | SFTConfig,
    names: RegisteredNames | None = None,
    check_files: bool = True,
    is_partial: bool = False,
) -> list[str]:
    """Return the messages of all checks on ``cfg``, a derived ``PPOConfig`` or ``SFTConfig``.

    If ``names`` is None, only built-in names are valid, and names of environments are not checked.
    With ``check_files``, files and directories that the config names must exist on this machine.
    With ``is_partial``, ``cfg`` lacks the keys that were refused. A check that reads such a key
    stops without a message.
    """
    device = "cpu"  # if the device was refused, check for CPU until it is corrected
    with contextlib.suppress(MissingKey):
        device = cfg.trainer.device
    ctx = CheckContext(names or RegisteredNames(), check_files, guess_device(device))
    messages: list[str] = []
    for problems in _run_checks(cfg, ctx):
        try:
            # Append messages one by one, to keep those that a check yields before MissingKey.
            for message in problems:
                messages.append(message)
        except MissingKey:
            if not is_partial:
                raise
    return messages


def _run_checks(cfg: PPOConfig | SFTConfig, ctx: CheckContext) -> Iterator[Problems]:
    if isinstance(cfg, PPOConfig):
        yield from (check(cfg, ctx) for check in PPO_CHECKS)
    else:
        yield from (check(cfg, ctx) for check in SFT_CHECKS)
    yield from (plugin.check(cfg, ctx) for plugin in METHOD_PLUGINS)
