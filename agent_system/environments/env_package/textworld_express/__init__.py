"""TextWorldExpress: eight kinds of text games on a fast Java engine.

The library ``textworld-express`` is in the extra ``envs``.
"""
