"""Validation that repeats its plays: samples of a task have to differ, and sampling keys count."""

from collections.abc import Iterator

from verl.config.problems import Context, Problems, problem
from verl.config.schema import PPOConfig
from verl.config.schema.rollout import RolloutConfig, ValSamplingConfig

PREFIX = "actor_rollout_ref.rollout.val_kwargs"
WITHOUT_EFFECT = ("temperature", "top_p", "top_k")  # while nothing is sampled
SAMPLED = f"{PREFIX}.do_sample=true {PREFIX}.temperature=1.0"


def check_repeated_validation(cfg: PPOConfig, _ctx: Context) -> Problems:
    """Refuse several plays of a validation task that would all be the same: pass@k, best@k and
    maj@k would be one number.
    """
    sampling = cfg.actor_rollout_ref.rollout.val_kwargs
    if sampling.n > 1 and (key := greedy_key(sampling)):
        why = f"validation is greedy ({key}), so the plays of a task are all the same"
        yield problem(cfg, f"{PREFIX}.n", why, "1 where nothing is sampled", SAMPLED)


def greedy_validation_notes(cfg: PPOConfig) -> Iterator[str]:
    """Name sampling keys of validation that are set and change nothing."""
    sampling = cfg.actor_rollout_ref.rollout.val_kwargs
    key = greedy_key(sampling)
    if key is None:
        return
    fields = ValSamplingConfig.model_fields
    for name in WITHOUT_EFFECT:
        value = getattr(sampling, name)
        if value != fields[name].default and not key.startswith(name):
            why = f"changes nothing, validation is greedy ({key})"
            yield f"{PREFIX}.{name}={value} {why}: {SAMPLED}"


def greedy_key(sampling: ValSamplingConfig | RolloutConfig) -> str | None:
    """Return the setting that makes ``sampling`` greedy; None where it samples."""
    if not sampling.do_sample:
        return "do_sample=false"
    if sampling.temperature == 0:
        return "temperature=0"
    return "top_k=1" if sampling.top_k == 1 else None
