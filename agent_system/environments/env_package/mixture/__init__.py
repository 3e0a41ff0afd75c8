"""Mixture of several environments in one run, in proportion to their weights."""
