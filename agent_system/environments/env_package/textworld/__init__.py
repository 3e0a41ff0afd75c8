"""TextWorld: games made and compiled on this machine by Microsoft's generator (``textworld``, in
the extra ``envs``).

``package`` the environment · ``store`` games on disk and task lists · ``generate`` the process that
makes them.
"""
