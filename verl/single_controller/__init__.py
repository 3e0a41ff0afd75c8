"""Groups of worker processes whose methods are called on all ranks with one call.

``base`` has the base class and the decorators of workers (``Worker``, ``register``, ``Dispatch``).
``ray`` runs groups of workers as Ray actors.
"""
