"""Sections of a configuration as typed values, for every room that has settings.

``section`` what a section is and how its keys are bounded · ``keys`` keys as data: type, default,
doc, bounds · ``reading`` from plain values to sections, every mistake named.
"""

from verl.config.settings.env_section import EnvSection
from verl.config.settings.errors import ConfigError, MissingKey, Refusal
from verl.config.settings.keys import Key, keys_of, lookup, plugged_key
from verl.config.settings.reading import read, read_or_raise
from verl.config.settings.section import (
    NULL,
    Derived,
    GpuOnly,
    NonNegative,
    NonNegativeInt,
    OpenSection,
    PositiveInt,
    RunsCode,
    Section,
    Seed,
    Share,
    Unused,
)

__all__ = [
    "NULL",
    "ConfigError",
    "Derived",
    "EnvSection",
    "GpuOnly",
    "Key",
    "MissingKey",
    "NonNegative",
    "NonNegativeInt",
    "OpenSection",
    "PositiveInt",
    "Refusal",
    "RunsCode",
    "Section",
    "Seed",
    "Share",
    "Unused",
    "keys_of",
    "lookup",
    "plugged_key",
    "read",
    "read_or_raise",
]
