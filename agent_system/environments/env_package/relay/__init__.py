"""Doors that open for whoever follows arrows far enough: how deep to think differs from step to
step, and how deep is known.
"""
