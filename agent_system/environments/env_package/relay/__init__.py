"""Relay: a sequence of puzzles ("doors"). In each, the policy follows arrows from place to place.

The thinking level that a turn requires is known, because it depends on the number of arrows.
"""
