"""Experiments: YAML files that override ``ppo_trainer`` or ``sft_trainer``, each runnable by
``--config-name``.
"""
