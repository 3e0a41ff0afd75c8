"""Typed configuration: schema, composition, checks and plan. Imports neither torch nor Ray."""
