"""TextArena: puzzles, and text games against an opponent, that need no download.

The library ``textarena`` is in the extra ``envs``.
"""
