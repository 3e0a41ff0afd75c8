"""Adapters of other trainers to this environment layer, one package for each trainer."""
