"""Relay: a sequence of puzzles ("doors"). A solution follows arrows from place to place."""
