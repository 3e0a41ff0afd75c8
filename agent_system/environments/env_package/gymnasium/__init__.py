"""Any environment of Gymnasium with discrete actions, in words (``gymnasium`` and ``minigrid``, in
the extra ``envs``).
"""
