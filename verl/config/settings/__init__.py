"""Sections of a configuration as typed values, for every package that has settings.

``section`` defines the base class of sections and the bounded types of their keys. ``keys`` gives
the keys as data: type, default, help text and bounds. ``reading`` turns plain values into sections
and reports every mistake.
"""

from verl.config.settings.errors import ConfigError, InvalidSettingError, MissingKeyError, Problem
from verl.config.settings.keys import Key, collect_section_keys, make_section_key, value_at_path
from verl.config.settings.reading import read_section, read_section_or_raise
from verl.config.settings.section import (
    NULL,
    VERL,
    VERL_AGENT,
    Derived,
    EnvSection,
    ExtensibleSection,
    GpuOnly,
    NamesCode,
    NonNegative,
    NonNegativeInt,
    PositiveInt,
    Section,
    Seed,
    Share,
    Unused,
)
