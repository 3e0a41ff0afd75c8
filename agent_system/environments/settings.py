"""What the settings of every environment have in common."""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, get_args

from annotated_types import Ge, Gt
from pydantic import ConfigDict, Strict, model_validator

from verl.config.settings import EnvSection, PositiveInt, RunsCode, Section, Seed

if TYPE_CHECKING:
    from verl.config.schema.env import EnvConfig

Placement = Literal["inline", "thread", "locked", "process"]


class FunctionFromFile(Section):
    """A function or class of the user's own."""

    path: Annotated[str | None, RunsCode()] = None
    """Python file that defines a function or class"""
    name: str | None = None
    """name of the function or class in its file"""


class EnvSettings(EnvSection):
    """The section of an environment; its package adds keys. It does not change once it is made.

    A package reads it in the trainer and in worker processes, which it reaches as JSON.
    """

    model_config = ConfigDict(frozen=True)
    # The key that a variant of the environment's name sets (``env_name=NAME/VARIANT``).
    variant_key: ClassVar[str] = ""
    # Variants without a key: names of the environment itself in other frameworks' jobs.
    own_variants: ClassVar[tuple[str, ...]] = ()
    # Every episode has one step.
    one_step: ClassVar[bool] = False

    max_steps: PositiveInt | None = None
    """steps after which the environment itself may end an episode; null: env.max_steps"""
    seed: Seed | None = None
    """seed of what the environment draws besides its tasks; null: env.seed"""
    placement: Placement | None = None
    """where the environment runs; null: where its package says"""
    level_prompts: dict[Annotated[int, Strict(False)], str] = {}
    """texts that replace descriptions of thinking levels; algorithm.rlvcr.prompts wins"""

    # Through JSON: pydantic hashes the fields of a frozen model, and a dict has no hash.
    def __hash__(self) -> int:
        return hash((type(self), self.model_dump_json()))

    @model_validator(mode="before")
    @classmethod
    def _null_is_left_out(cls, values: Any) -> Any:
        if isinstance(values, dict):
            return {key: value for key, value in values.items() if value is not None}
        return values

    @classmethod
    def choices(cls) -> tuple[str, ...]:
        """The values of ``variant_key``, where its type lists them: what a package whose variants
        are fixed gives as ``EnvPackage.variants``.
        """
        return get_args(cls.model_fields[cls.variant_key].annotation)

    def completed(self, env: "EnvConfig") -> Self:
        """With what other keys of ``env``, the section above, say."""
        del env  # they say nothing here
        return self

    def own_placement(self) -> Placement | None:
        """Where these settings want the environment to run; None: where its package says."""
        return self.placement

    def memory_limit(self) -> float | None:
        """Address space of a worker process in gigabytes; None where it has no bound."""
        return None

    def stand_in_for(self, env_name: str) -> str:
        """What is played in place of what ``env_name`` promises, in words; empty where it is what
        it says.
        """
        del env_name
        return ""


class GradedSettings(EnvSettings):
    """Settings of an environment that runs code of others on what a policy said: how long and with
    how much memory.
    """

    grade_s: Annotated[float, Gt(0)] = 10.0
    """seconds that grading an answer may take; then its play is broken, and its neighbours go on"""
    memory_gb: Annotated[float, Ge(1)] = 8.0
    """address space of a worker process, in gigabytes; what asks for more breaks its play"""

    def memory_limit(self) -> float | None:
        """``memory_gb``."""
        return self.memory_gb
