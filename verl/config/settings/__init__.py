"""Sections of a configuration as typed values, for every package that has settings."""

from verl.config.settings.errors import ConfigError, MissingKey, Problem, Refusal
from verl.config.settings.keys import Key, collect_section_keys, make_section_key, value_at_path
from verl.config.settings.reading import read_section, read_section_or_raise
from verl.config.settings.section import (
    NULL,
    VERL,
    VERL_AGENT,
    Derived,
    EnvSection,
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
