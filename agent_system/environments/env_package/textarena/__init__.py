"""TextArena: puzzles and two-sided text games that need no download.

The library ``textarena`` is in the extra ``envs``.
"""
