"""Text version of every Gymnasium environment with discrete actions.

``gymnasium`` and ``minigrid`` are in the extra ``envs``.
"""
