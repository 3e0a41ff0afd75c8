"""Reward managers: they assign the return of a trajectory to tokens of its rows."""

from verl.utils.lazy import make_lazy_exports

__getattr__, __all__ = make_lazy_exports(
    __name__,
    {
        "REWARD_MANAGERS": "managers",
        "EpisodeRewardManager": "managers",
        "StepRewardManager": "managers",
        "RewardManager": "managers",
        "load_reward_manager": "managers",
        "register": "managers",
    },
)
