"""TextArena: single-player puzzles in text that need no download (``textarena``, in the extra
``envs``).
"""
