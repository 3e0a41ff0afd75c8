"""Utilities shared by every room: masked maths, sequence balancing, sampling types, checkpoints,
files, seeds, hints.
"""
