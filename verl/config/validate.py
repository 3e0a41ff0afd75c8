"""Cross-field checks, all of them, run in one place. A message says what, where, what is allowed
and how to mend it.

Each check yields messages; ``validate`` runs all of them and raises one ConfigError that lists
everything found. The checks themselves stand in ``verl.config.checks``.
"""

from collections.abc import Iterator

from verl.config.checks.batch_sizes import check_batches, check_lengths, check_sampling
from verl.config.checks.hardware_and_paths import check_devices, check_env, check_ray, check_run
from verl.config.checks.losses import (
    check_gdpo,
    check_losses,
    check_overlap,
    check_rollout_correction,
)
from verl.config.checks.no_effect import check_data_files, check_no_effect, check_pairs
from verl.config.checks.policy import check_estimator, check_model, check_reward_model
from verl.config.checks.sampling import check_repeated_validation
from verl.config.checks.sft import check_sft
from verl.config.load import guess_device
from verl.config.plugins import METHODS
from verl.config.problems import Context, Names, Problems
from verl.config.registered_names import check_columns, check_names
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.settings import ConfigError, MissingKey

PPO_CHECKS = (
    check_data_files,
    check_no_effect,
    check_pairs,
    check_model,
    check_reward_model,
    check_names,
    check_estimator,
    check_columns,
    check_lengths,
    check_batches,
    check_losses,
    check_overlap,
    check_rollout_correction,
    check_gdpo,
    check_sampling,
    check_repeated_validation,
    check_devices,
    check_env,
    check_ray,
    check_run,
)
SFT_CHECKS = (check_no_effect, check_sft, check_env, check_run)


def find_problems(
    cfg: PPOConfig | SFTConfig,
    names: Names | None = None,
    check_files: bool = True,
    partial: bool = False,
) -> list[str]:
    """Messages of all checks on ``cfg``, a derived ``PPOConfig`` or ``SFTConfig``.

    ``names`` are the registered ones (None: those that ship are known, environments are not
    checked); ``check_files`` asks that files and directories which the config names exist on this
    machine. A ``partial`` config lacks the keys that were refused: a check that needs one of them
    ends there.
    """
    ctx = Context(names or Names(), check_files, guess_device(_device(cfg)))
    found: list[str] = []
    for problems in _checks(cfg, ctx):
        try:
            # One by one: what a check said before it met a missing key is kept.
            for message in problems:
                found.append(message)
        except MissingKey:
            if not partial:
                raise
    return found


def _checks(cfg: PPOConfig | SFTConfig, ctx: Context) -> Iterator[Problems]:
    if isinstance(cfg, PPOConfig):
        yield from (check(cfg, ctx) for check in PPO_CHECKS)
    else:
        yield from (check(cfg, ctx) for check in SFT_CHECKS)
    yield from (plugin.check(cfg, ctx) for plugin in METHODS)


def _device(cfg: PPOConfig | SFTConfig) -> str:
    try:
        return cfg.trainer.device
    except MissingKey:
        # The device was refused: the checks of GPUs wait until it is mended.
        return "cpu"


def validate(
    cfg: PPOConfig | SFTConfig, names: Names | None = None, check_files: bool = True
) -> None:
    """Raise ConfigError with everything that ``find_problems`` finds; return None when that is
    nothing.
    """
    problems = find_problems(cfg, names, check_files)
    if problems:
        raise ConfigError(problems)
