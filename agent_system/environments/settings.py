"""Base classes of the settings of environments."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, get_args

from annotated_types import Ge, Gt
from pydantic import ConfigDict, Strict, model_validator

from verl.config.settings import EnvSection, NamesCode, PositiveInt, Section, Seed

if TYPE_CHECKING:
    from verl.config.schema.env import EnvConfig

Placement = Literal["inline", "thread", "locked", "process"]


def compute_longest_wait(
    attempts: int, timeout_s: float, first_pause_s: float, max_pause_s: float, jitter_s: float = 0.0
) -> float:
    """Return the seconds of ``attempts`` requests that all time out, with the pauses between them.

    Pauses double from ``first_pause_s``. Up to ``jitter_s`` is added, and the sum is limited.
    """
    pauses = [
        min(first_pause_s * 2**number + jitter_s, max_pause_s) for number in range(attempts - 1)
    ]
    return attempts * timeout_s + sum(pauses)


class FunctionFromFile(Section):
    """Config values that name a user-provided function or class: the Python file and the name."""

    path: Annotated[str | None, NamesCode()] = None
    """Python file that defines a function or class"""
    name: str | None = None
    """name of the function or class in its file"""


class EnvSettings(EnvSection):
    """Config section ``env.<name>`` of an environment; immutable. The package adds keys."""

    model_config = ConfigDict(frozen=True)
    # Name of the setting that gets the value VARIANT of ``env.env_name=NAME/VARIANT``.
    variant_key: ClassVar[str] = ""
    # Values of VARIANT that have no effect. Job scripts of other frameworks use them for the same
    # environment.
    variant_aliases: ClassVar[tuple[str, ...]] = ()
    # True if every episode has one turn.
    is_single_turn: ClassVar[bool] = False

    max_steps: PositiveInt | None = None
    """steps after which the environment itself may end an episode; null: env.max_steps"""
    seed: Seed | None = None
    """seed of all random choices of the environment except its tasks; null: env.seed"""
    placement: Placement | None = None
    """where the environment runs; null: the default of its package"""
    level_prompts: dict[Annotated[int, Strict(False)], str] = {}
    """texts that replace descriptions of thinking levels; algorithm.rlvcr.prompts has precedence"""

    # Hash the JSON text: pydantic would hash the fields, and a dict has no hash.
    def __hash__(self) -> int:
        return hash((type(self), self.model_dump_json()))

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, values: object) -> Any:
        if isinstance(values, dict):
            return {key: value for key, value in values.items() if value is not None}
        return values

    @classmethod
    def list_variants(cls) -> tuple[str, ...]:
        """Return the variants: the values of the field whose name is in ``variant_key``.

        A package with a fixed list of variants uses this method as ``EnvPackage.variants``.
        """
        return get_args(cls.model_fields[cls.variant_key].annotation)

    def with_derived_values(self, env: "EnvConfig") -> Self:
        """Return these settings with values derived from other keys of the section ``env``."""
        return self

    def chosen_placement(self) -> Placement | None:
        """Return where the environment runs (see ``Env``); None: as its class says."""
        return self.placement

    def memory_limit_gb(self) -> float | None:
        """Return the limit of a worker's address space in gigabytes; None: no limit."""
        return None

    def describe_substitute_data(self, env_name: str) -> str:
        """Return a sentence that says which data replace the configured data; "" if none do."""
        return ""


class GraderLimitSettings(EnvSettings):
    """Settings of an environment with limits of time and memory for its grader.

    The limits are needed because the grader reads text of the policy.
    """

    grade_s: Annotated[float, Gt(0)] = 10.0
    """seconds that grading an answer may take; a trajectory that takes longer has failed"""
    memory_gb: Annotated[float, Ge(1)] = 8.0
    """address space of a worker process, in gigabytes; a trajectory that needs more has failed"""

    def memory_limit_gb(self) -> float | None:
        return self.memory_gb

    def list_max_step_waits(self) -> Mapping[str, float]:
        return {"grade_s": self.grade_s}


class PromptSettings(EnvSettings):
    """Settings of an environment with prompts for chat models and for small policies."""

    prompt: Literal["full", "compact"] = "full"
    """full: rules and answer format for chat models; compact: short observations only, for policies
    trained by imitation"""
