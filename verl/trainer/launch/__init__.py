"""The composition root: the only room of ``verl`` that knows agents and the method, used by the
entry points.

``ppo`` and ``sft`` join the concrete classes of every room into a run, ``evaluate`` does so for a
measurement, ``preflight`` refuses what cannot work before anything starts, ``extensions`` looks up
what is registered.
"""
