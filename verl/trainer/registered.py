"""The names that every registry of this process knows; importing what fills them is left to the call."""

from verl.trainer.config.problems import Names


def registered_names() -> Names:
    """Environments, estimators, policy losses and engines by name."""
    import rlvcr.core_rlvcr  # noqa: F401  (registers the estimators rlvcr and copo)
    from agent_system.environments.registry import REGISTRY
    from verl.trainer.ppo.core_algos import ADV_ESTIMATORS, POLICY_LOSSES, missing_inputs
    from verl.workers.rollout.registry import ENGINES

    needs = {name: missing_inputs(estimator, ()) for name, estimator in ADV_ESTIMATORS.items()}
    return Names(REGISTRY.keys(), needs, POLICY_LOSSES.keys(), ENGINES.keys())
