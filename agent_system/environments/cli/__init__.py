"""Command line of environments: list names, check rewards, run an episode by hand.

- ``command``: arguments and output.
- ``names``: names of environments and their variants.
- ``checking``: checks of the rewards.
- ``policies``, ``check_episodes``, ``constant_actions``: policies of a check and their episodes.
- ``interactive``: an episode whose actions are typed.
- ``limits``: limits of time and memory.
"""
