"""TextWorldExpress: eight kinds of text games on a fast Java engine (``textworld-express``, in the
extra ``envs``).
"""
