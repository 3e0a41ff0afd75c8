"""The ``env.frozen_lake`` section."""

from typing import Annotated, Literal

from annotated_types import Ge, Le

from agent_system.environments.settings import EnvSettings
from verl.config.settings import PositiveInt, Seed


class LakeSettings(EnvSettings):
    """How lakes look, and how many there are."""

    size: Annotated[int, Ge(3), Le(16)] = 4
    """cells per side of the lake"""
    # Below 0.6 hardly a lake can be crossed.
    frozen: Annotated[float, Ge(0.6), Le(0.95)] = 0.8
    """share of the cells that is ice when a map is drawn"""
    slippery: bool = False
    """slippery ice: one move in three goes where it should"""
    train_maps: PositiveInt = 1000
    """maps to train on; a small lake has fewer"""
    val_maps: PositiveInt = 128
    """maps held out; a small lake has fewer"""
    map_seed: Seed = 0
    """seed of the maps: the same ones in every run"""
    prompt: Literal["full", "compact"] = "full"
    """full: rules and answer format for chat models; compact: observations alone, for policies made
    by imitation"""
