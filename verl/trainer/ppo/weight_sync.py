"""Checks after every weight sync.

A failed check ends the run. If the rollout engines had other weights than the trainer, all later
results would be wrong without any other sign.
"""

from collections.abc import Mapping, Sequence

from verl.records import WeightFingerprints

SHOWN_NAMES = 3  # largest number of tensor names in a message


class WeightSyncError(RuntimeError):
    """Weights that differ from those sent, or that did not change although they were updated."""


def verify_weights_received(
    fingerprints: WeightFingerprints, received: Sequence[Mapping[str, int]], version: int
) -> None:
    """Raise ``WeightSyncError`` unless every engine ``received`` weights with ``fingerprints``."""
    for worker_index, engine in enumerate(received):
        bad_names = [
            name for name, value in fingerprints.sent_weights.items() if engine.get(name) != value
        ]
        if bad_names:
            raise WeightSyncError(
                f"rollout worker {worker_index} did not receive version {version} of the weights: "
                f"{len(bad_names)} of {len(fingerprints.sent_weights)} are missing or differ from "
                f"those that were sent, for example {', '.join(bad_names[:SHOWN_NAMES])}; it would "
                "generate with an older policy"
            )


def verify_weights_changed(
    before: WeightFingerprints | None, after: WeightFingerprints, version: int
) -> None:
    """Raise ``WeightSyncError`` if no weight changed between two exports.

    Called only if the optimizer took a step with a gradient in between.
    """
    if before is not None and before.master_weights == after.master_weights:
        raise WeightSyncError(
            f"the optimizer took a step with a gradient before version {version}, but no weight "
            "of the rollout engines has changed: the step, the adapters or the learning rate have "
            "no effect; see actor/grad_norm and actor/lr"
        )


def has_updated_weights(metrics: Mapping[str, float]) -> bool:
    """Return True if a policy update with these ``actor/`` metrics changed weights."""
    steps = metrics.get("actor/optimizer_steps", 0.0)
    idle = metrics.get("actor/skipped_steps", 0.0) + metrics.get("actor/zero_steps", 0.0)
    return steps > idle and metrics.get("actor/lr", 0.0) > 0.0
