"""Supervised training on weighted token rows: what rows are, how batches are cut, and the loop over
them.
"""
