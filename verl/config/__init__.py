"""Typed configuration: schema, composition, checks and plan.

Imports neither torch nor Ray nor an engine. ``load.load_config`` returns the typed configuration,
``validate`` checks combinations of keys. ``plan`` computes the numbers of tasks, rows, steps,
workers and tokens, and the memory of the run.
"""
