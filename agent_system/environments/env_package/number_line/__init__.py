"""Walk along the number line to a target: the smallest environment, for tests and as a pattern to
copy.
"""
