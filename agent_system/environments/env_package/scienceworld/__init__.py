"""ScienceWorld: thirty kinds of elementary science experiments in text (``scienceworld``, in the
extra ``envs``).
"""
