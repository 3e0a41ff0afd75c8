"""ScienceWorld: thirty kinds of elementary science experiments in text.

The library ``scienceworld`` is in the extra ``envs``.
"""
