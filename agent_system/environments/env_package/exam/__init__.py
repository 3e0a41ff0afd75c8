"""Exam: an episode is a series of reasoning-gym questions, and the first wrong answer ends it.

Demonstrated thoughts of all levels come from one rule over the trace of a solver.
"""
