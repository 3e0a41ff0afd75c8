"""Utilities shared by every room: masked maths, sequence balancing, sampling types, seeds,
tracking.
"""
