"""Command line of environments: list names, check rewards, run an episode by hand.

- ``command``: arguments and output.
- ``names``: names of environments and their variants.
- ``checking``: check that scripted policies get the rewards that they should get.
- ``policies``, ``check_episodes``: scripted policies and their episodes.
- ``interactive``: an episode whose actions are typed.
- ``limits``: time and memory limits for listing the tasks.
"""
