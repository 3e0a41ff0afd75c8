"""Call one method on a group of worker processes as if they were one object.

``base`` holds what a worker class needs (``Worker``, ``register``, ``Dispatch``); ``ray`` runs
groups of them as Ray actors.
"""
