"""What has to hold after every hand-over of weights, or the run ends: players that sample from
other weights than those that learn make every later number wrong, and nothing else would show it.
"""

from collections.abc import Mapping, Sequence

from verl.records import WeightSketch

SHOWN = 3  # names in a message


class WeightSyncError(RuntimeError):
    """Weights did not arrive where they were sent, or did not change although they were moved."""


def prove_arrival(sketch: WeightSketch, taken: Sequence[Mapping[str, int]], version: int) -> None:
    """Raise ``WeightSyncError`` unless every engine ``taken`` from has all weights that were sent,
    bit by bit; ``version`` is theirs.
    """
    for number, found in enumerate(taken):
        wrong = [name for name, value in sketch.sent.items() if found.get(name) != value]
        if wrong:
            raise WeightSyncError(
                f"rollout worker {number} did not get version {version} of the weights: "
                f"{len(wrong)} of {len(sketch.sent)} are missing or differ from those that were "
                f"sent, the first of them {', '.join(wrong[:SHOWN])}; it would go on playing with "
                "an older policy"
            )


def prove_movement(before: WeightSketch | None, after: WeightSketch, version: int) -> None:
    """Raise ``WeightSyncError`` where an optimizer step with a gradient was taken between two
    exports, and no weight changed.
    """
    if before is not None and before.held == after.held:
        raise WeightSyncError(
            f"the optimizer took a step with a gradient before version {version}, and no weight "
            "that the players get has changed: the step, the adapters or the learning rate have no "
            "effect (see actor/grad_norm and actor/lr)"
        )


def has_moved(metrics: Mapping[str, float]) -> bool:
    """Whether the policy's update took a step that moves weights, as its ``actor/`` metrics say."""
    steps = metrics.get("actor/optimizer_steps", 0.0)
    idle = metrics.get("actor/skipped_steps", 0.0) + metrics.get("actor/zero_steps", 0.0)
    return steps > idle and metrics.get("actor/lr", 0.0) > 0.0
