"""TextArena: text games for one or two players that need no download.

The library ``textarena`` is in the extra ``envs``.
"""
