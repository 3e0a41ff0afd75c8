"""Typed configuration: schema, composition, checks and plan. Imports neither torch nor Ray nor an
engine.

``load_config(name, overrides)`` gives a typed object, ``validate`` checks it across fields,
``make_plan`` counts what it will do, ``cli`` is the command line that the entry points share.
"""

from verl.trainer.config.derive import derive, trajectories_per_iteration
from verl.trainer.config.load import default_config, load_config, read_config, to_dict, to_yaml
from verl.trainer.config.plugged import schema_keys
from verl.trainer.config.schema import PPOConfig, SFTConfig
from verl.utils.settings import ConfigError, lookup

__all__ = [
    "ConfigError",
    "PPOConfig",
    "SFTConfig",
    "default_config",
    "derive",
    "load_config",
    "lookup",
    "read_config",
    "schema_keys",
    "to_dict",
    "to_yaml",
    "trajectories_per_iteration",
]
