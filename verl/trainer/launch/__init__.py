"""Composition root of the entry points: the only package of ``verl`` that imports
``agent_system`` and ``rlvcr``.

``ppo`` and ``sft`` build a run from the concrete classes of all packages. ``level_comparison``
does so for an evaluation. ``preflight`` checks a configuration before the run starts.
``extensions`` adds the keys and names of environments and methods.
"""
