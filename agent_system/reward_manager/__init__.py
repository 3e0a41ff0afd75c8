"""Reward managers: they assign the return of a trajectory to tokens of its rows."""

from verl.utils.lazy import lazy

__getattr__, __all__ = lazy(
    __name__,
    {
        "REWARD_MANAGERS": "registry",
        "EpisodeRewardManager": "managers",
        "StepRewardManager": "managers",
        "RewardManager": "registry",
        "load_reward_manager": "loading",
        "register": "registry",
    },
)
