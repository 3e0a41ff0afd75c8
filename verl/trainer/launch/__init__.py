"""Construction of runs for the entry points: the only package of ``verl`` that imports
``agent_system`` and ``rlvcr``.

``ppo`` and ``sft`` create the objects of a run from the classes of all packages.
``level_comparison`` runs an evaluation. ``preflight`` checks a configuration before the run starts.
``extensions`` adds the config keys and registered names of environments and methods.
"""
