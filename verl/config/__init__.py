"""Typed configuration: schema, composition, checks and plan.

Imports neither torch nor Ray nor an engine. ``load.load_config`` returns the typed configuration,
``validate`` checks it across fields and ``plan`` counts what the run will do.
"""
