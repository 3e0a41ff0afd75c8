"""TextWorld: games that Microsoft's generator makes and compiles on this machine.

The library ``textworld`` is in the extra ``envs``.

- ``package``: the environment
- ``store``: games on disk and task lists
- ``generate``: the process that makes games
"""
