"""What the method adds to the record of a run; importing this module registers it."""

from collections.abc import Mapping

from verl.protocol import DataProto
from verl.sections import register_batch_metrics

LEVELS = (1, 2, 3, 4)


@register_batch_metrics("level_share")
def level_shares(batch: DataProto, prefix: str) -> dict[str, float]:
    """``<prefix>level_share_1..4``: the share of steps at each thinking level, among the steps that
    chose one.
    """
    steps = [step for of_row in batch.non_tensor_batch["steps"] for step in of_row]
    levels = [_level(step) for step in steps]
    chosen = [level for level in levels if level]
    if not chosen:
        return {}
    return {f"{prefix}level_share_{level}": chosen.count(level) / len(chosen) for level in LEVELS}


def _level(step: object) -> int | None:
    if isinstance(step, Mapping):
        return step.get("level")
    return getattr(step, "level", None)
