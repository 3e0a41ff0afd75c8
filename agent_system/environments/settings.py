"""What the settings of every environment have in common."""

from typing import Annotated, Any, ClassVar, Literal, get_args

from annotated_types import Ge, Gt
from pydantic import ConfigDict, Strict, model_validator

from verl.utils.settings import NonNegativeInt, PositiveInt, Section

Placement = Literal["inline", "thread", "locked", "process"]


class EnvSettings(Section):
    """The section of an environment; its package adds keys. It does not change once it is made.

    A package reads it in the trainer and in worker processes, which it reaches as JSON.
    """

    model_config = ConfigDict(frozen=True)
    # The key that a variant of the environment's name sets (``env_name=NAME/VARIANT``).
    variant_key: ClassVar[str] = ""

    max_steps: PositiveInt | None = None
    """steps after which the environment itself may end an episode; null: env.max_steps"""
    seed: NonNegativeInt | None = None
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
    def variants(cls) -> tuple[str, ...]:
        """What can stand behind the slash of the environment's name: the values of ``variant_key``
        where they are written down, else none. A class that asks a library for them raises
        ``ModuleNotFoundError`` where that is not installed.
        """
        if not cls.variant_key:
            return ()
        values = get_args(cls.model_fields[cls.variant_key].annotation)
        return tuple(value for value in values if isinstance(value, str))

    def known_tasks(self, split: str) -> int | None:
        """How many tasks ``split`` has, as far as the settings say; None where only the package
        knows.
        """
        del split
        return None

    def file_key(self, split: str) -> str | None:
        """The key of this section that names a file of tasks of ``split``; None where there is
        none.
        """
        del split
        return None


class GradedSettings(EnvSettings):
    """Settings of an environment that runs code of others on what a policy said: how long and with
    how much memory.
    """

    grade_s: Annotated[float, Gt(0)] = 10.0
    """seconds that grading an answer may take; then its play is broken, and its neighbours go on"""
    memory_gb: Annotated[float, Ge(1)] = 8.0
    """address space of a worker process, in gigabytes; what asks for more breaks its play"""
