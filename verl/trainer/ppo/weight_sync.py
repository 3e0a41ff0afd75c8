"""Checks after every weight sync. A failed check ends the run: rollout engines with other weights
than the trainer make every later number wrong, and nothing else would show it.
"""

from collections.abc import Mapping, Sequence

from verl.records import WeightSketch

SHOWN = 3  # names in a message


class WeightSyncError(RuntimeError):
    """Weights differ from those that were sent, or did not change although they were updated."""


def verify_weights_received(
    fingerprints: WeightSketch, received: Sequence[Mapping[str, int]], version: int
) -> None:
    """Raise ``WeightSyncError`` unless every engine has ``received`` all weights of ``version``
    bit by bit.
    """
    for number, engine in enumerate(received):
        wrong = [name for name, value in fingerprints.sent.items() if engine.get(name) != value]
        if wrong:
            raise WeightSyncError(
                f"rollout worker {number} did not get version {version} of the weights: "
                f"{len(wrong)} of {len(fingerprints.sent)} are missing or differ from those that "
                f"were sent, the first of them {', '.join(wrong[:SHOWN])}; it would generate with "
                "an older policy"
            )


def verify_weights_changed(before: WeightSketch | None, after: WeightSketch, version: int) -> None:
    """Raise ``WeightSyncError`` where no weight differs between two exports although the optimizer
    took a step with a gradient in between.
    """
    if before is not None and before.held == after.held:
        raise WeightSyncError(
            f"the optimizer took a step with a gradient before version {version}, and no weight "
            "that the rollout engines get has changed: the step, the adapters or the learning rate "
            "have no effect (see actor/grad_norm and actor/lr)"
        )


def has_updated_weights(metrics: Mapping[str, float]) -> bool:
    """Return whether the policy update took a step that changes weights, by its ``actor/``
    metrics.
    """
    steps = metrics.get("actor/optimizer_steps", 0.0)
    idle = metrics.get("actor/skipped_steps", 0.0) + metrics.get("actor/zero_steps", 0.0)
    return steps > idle and metrics.get("actor/lr", 0.0) > 0.0
