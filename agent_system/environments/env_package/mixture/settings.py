"""Settings of the config section ``env.mixture``."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from pydantic import field_validator

from agent_system.environments.env_registry import (
    canonicalize_env_name,
    find_settings_class,
    read_env_settings,
)
from agent_system.environments.settings import EnvSettings
from verl.config.settings import PositiveInt, read_section_or_raise
from verl.config.settings.errors import UserError

if TYPE_CHECKING:
    from verl.config.schema.env import EnvConfig

DEFAULT_PARTS = {"frozen_lake": 1, "number_line": 1}
# An environment of a mixture as text: NAME, or NAME=WEIGHT.
_WEIGHTED_PART_PATTERN = re.compile(r"\s*([^=]*[^=\s])\s*(?:=\s*(0*[1-9][0-9]*)\s*)?")


class MixtureSettings(EnvSettings):
    """Environments of a mixture and their weights."""

    # The default is None, because a default dict would be merged with the parts of the user.
    parts: dict[str, PositiveInt] | None = None
    """environments by name, NAME or NAME/VARIANT, and their weights: {frozen_lake: 2, sokoban: 1},
    or ["my_lab.grid:PACKAGE=2", "sokoban=1"] if a name contains a colon; the default weight is 1;
    null: frozen_lake and number_line"""
    kwargs: dict[str, dict[str, Any]] = {}
    """keys of parts by name; they override those of the part's section (env.frozen_lake)"""

    @field_validator("parts", mode="before")
    @classmethod
    def _convert_list_to_dict(cls, parts: object) -> Any:
        # Refuse keys with a colon: the command line parses {a:P: 2} as {"a": "P: 2"}.
        if isinstance(parts, dict) and any(":" in str(value) for value in parts.values()):
            raise UserError(
                f"{parts!r}: on the command line a name with a colon cannot be a key; "
                'allowed: a list of "NAME=WEIGHT" in quotes; '
                'fix: ["my_lab.grid:PACKAGE=2", "sokoban"]',
                "invalid_syntax",
            )
        if not isinstance(parts, list):
            return parts
        weights_by_name: dict[str, Any] = {}
        for part in parts:
            match = _WEIGHTED_PART_PATTERN.fullmatch(part) if isinstance(part, str) else None
            if match is None:
                raise UserError(
                    f"{part!r}; allowed in a list: NAME, or NAME=WEIGHT with a positive integer; "
                    'fix: ["frozen_lake=2", "sokoban"]',
                    "invalid_syntax",
                )
            part_name, weight = match.groups()
            if part_name in weights_by_name:
                raise ValueError(
                    f"{part_name!r} occurs twice; allowed: each environment once; "
                    "fix: remove one entry"
                )
            weights_by_name[part_name] = int(weight or 1)
        return weights_by_name

    @field_validator("parts")
    @classmethod
    def _check_parts(cls, parts: dict[str, int] | None) -> dict[str, int] | None:
        if parts is None:
            return None
        if not parts or any(name.split("/", 1)[0] == "mixture" for name in parts):
            raise ValueError(
                "no environment is named, or a mixture is among them; "
                'allowed: names of other environments; fix: ["frozen_lake=2", "sokoban"]'
            )
        return parts

    @property
    def part_weights(self) -> Mapping[str, int]:
        return DEFAULT_PARTS if self.parts is None else self.parts

    def read_part_settings(self, part: str) -> EnvSettings:
        """Return the settings of ``part``. Raises ``ConfigError`` if they are invalid."""
        section_key = f"env.{part.split('/', 1)[0]}"
        return read_section_or_raise(find_settings_class(part), self.kwargs.get(part), section_key)

    def with_derived_values(self, env: "EnvConfig") -> Self:
        """Return a copy whose ``kwargs`` hold all settings of every part (mixed environment).

        They are read from the config section of the part in ``env`` and overridden by the present
        ``kwargs``. Raises ``ConfigError`` and ``UnknownEnvironmentError``.
        """
        settings_by_part: dict[str, dict[str, Any]] = {}
        for part in self.part_weights:
            part_keys = {"env_name": part, "kwargs": self.kwargs.get(part, {})}
            shared_keys = {"max_steps": self.max_steps, "seed": self.seed}
            settings = read_env_settings(env.model_copy(update=part_keys | shared_keys))
            settings_by_part[part] = settings.model_dump(mode="json", exclude_none=True)
        return self.model_copy(update={"kwargs": settings_by_part})

    def describe_substitute_data(self, env_name: str) -> str:
        descriptions = [
            self.read_part_settings(part).describe_substitute_data(canonicalize_env_name(part))
            for part in self.part_weights
        ]
        return "; ".join(filter(None, descriptions))

    def memory_limit_gb(self) -> float | None:
        """Return the largest memory limit of the mixed environments: all run in one process."""
        memory_limits = [
            self.read_part_settings(part).memory_limit_gb() for part in self.part_weights
        ]
        return max((limit for limit in memory_limits if limit is not None), default=None)
