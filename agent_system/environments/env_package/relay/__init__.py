"""Relay: a sequence of puzzles ("doors"). A solution follows arrows from place to place.

The thinking level that a turn requires is known, because it depends on the number of arrows.
"""
