"""Reward managers: what an episode earned, placed on the tokens of its rows."""

__all__ = ["REWARD_MANAGERS", "EpisodeRewardManager", "StepRewardManager", "load_reward_manager"]


def __getattr__(name: str):
    if name in __all__:
        from agent_system.reward_manager import managers

        return getattr(managers, name)
    raise AttributeError(f"module 'agent_system.reward_manager' has no attribute {name!r}")
