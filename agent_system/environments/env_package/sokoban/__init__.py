"""Sokoban: push every box onto a target, with generated levels, as text or images.

- ``settings``: the config section. ``levels``: generation of levels.
- ``render`` and ``prompts``: texts and images. ``package``: the environment.
- ``expert``: demonstrations.
"""
