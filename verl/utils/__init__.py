"""Utilities of all packages: masked maths, sequence balancing, checkpoints, files, seeds."""
