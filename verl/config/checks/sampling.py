"""Checks of sampling in validation with several trajectories per task."""

from collections.abc import Iterator

from verl.config.problems import CheckContext, Problems, build_problem
from verl.config.schema import PPOConfig
from verl.config.schema.rollout import RolloutConfig, ValSamplingConfig

PREFIX = "actor_rollout_ref.rollout.val_kwargs"
WITHOUT_EFFECT = ("temperature", "top_p", "top_k")  # keys that greedy validation ignores
SAMPLED = f"{PREFIX}.do_sample=true {PREFIX}.temperature=1.0"


def check_repeated_validation(cfg: PPOConfig, _ctx: CheckContext) -> Problems:
    """Refuse several greedy trajectories of a validation task, because all would be equal.

    The metrics pass@k, best@k and maj@k would be one number.
    """
    sampling = cfg.actor_rollout_ref.rollout.val_kwargs
    if sampling.n > 1 and (key := greedy_key(sampling)):
        why = f"validation is greedy ({key}), so all trajectories of a task are equal"
        yield build_problem(cfg, f"{PREFIX}.n", why, "1 in greedy validation", SAMPLED)


def greedy_validation_notes(cfg: PPOConfig) -> Iterator[str]:
    """Yield a note for each sampling key of validation that is set and has no effect."""
    sampling = cfg.actor_rollout_ref.rollout.val_kwargs
    key = greedy_key(sampling)
    if key is None:
        return
    fields = ValSamplingConfig.model_fields
    for name in WITHOUT_EFFECT:
        value = getattr(sampling, name)
        if value != fields[name].default and not key.startswith(name):
            why = f"has no effect, because validation is greedy ({key})"
            yield f"{PREFIX}.{name}={value} {why}: {SAMPLED}"


def greedy_key(sampling: ValSamplingConfig | RolloutConfig) -> str | None:
    """Return the ``key=value`` that makes ``sampling`` greedy; None if it draws random tokens."""
    if not sampling.do_sample:
        return "do_sample=false"
    if sampling.temperature == 0:
        return "temperature=0"
    return "top_k=1" if sampling.top_k == 1 else None
