"""Relay: a sequence of doors, each solved by following a number of arrows.

The required thinking level is known and differs from turn to turn.
"""
