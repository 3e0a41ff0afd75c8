"""Base class of config sections: pydantic models whose attribute docstrings are the help text."""

import copy
import functools
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Optional, Self, TypeVar

from annotated_types import Ge, Le
from pydantic import BaseModel, ConfigDict, PrivateAttr

from verl.config.settings.errors import MissingKeyError

PositiveInt = Annotated[int, Ge(1)]
NonNegativeInt = Annotated[int, Ge(0)]
# Below 2**31, so that torch, numpy and vLLM also accept it with a rank or engine number added.
Seed = Annotated[int, Ge(0), Le(2**31 - 1)]
NonNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]
NULL: Any = None  # the default of a derived key

if TYPE_CHECKING:
    T = TypeVar("T")
    Derived = Annotated[T, "computed before the config is used"]
else:

    class Derived:
        """Type of a key that is null until ``derive_values`` computes it: ``Derived[int]``."""

        def __class_getitem__(cls, value_type: object) -> object:
            return Optional[value_type]  # noqa: UP045  it may be any type expression


class Section(BaseModel):
    """A group of keys. Values are validated on construction of the section, not on assignment.

    Types are strict: ``true`` is not a number, ``"4"`` is not an integer, and numbers are finite.
    ``verl.config.settings.reading`` converts the text of files and command lines first.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    # Keys of earlier versions. They are ignored in the stored config of a run.
    retired_keys: ClassVar[tuple[str, ...]] = ()

    _is_frozen: bool = PrivateAttr(default=False)

    def as_frozen(self) -> Self:
        """Return a deep copy that refuses assignments; ``self`` if it already refuses them."""
        return self if (self.__pydantic_private__ or {}).get("_is_frozen") else self.with_values({})

    def with_values(self, values: Mapping[str, object]) -> Self:
        """Return a frozen deep copy in which ``values`` (dotted path -> value) are replaced."""
        copied_section = self.model_copy(deep=True)
        for path, value in values.items():
            *section_names, name = path.split(".")
            section = functools.reduce(getattr, section_names, copied_section)
            # Also assign in sections that are frozen, as those among ``values`` may be.
            BaseModel.__setattr__(section, name, copy.deepcopy(value))
        copied_section._freeze()
        return copied_section

    def __eq__(self, other: object) -> bool:
        # Private attributes are not compared, so that a frozen copy equals its source.
        if not isinstance(other, Section) or type(self) is not type(other):
            return NotImplemented
        has_same_extra_values = self.__pydantic_extra__ == other.__pydantic_extra__
        return has_same_extra_values and vars(self) == vars(other)

    def _freeze(self) -> None:
        for value in (*vars(self).values(), *(self.__pydantic_extra__ or {}).values()):
            if isinstance(value, Section):
                value._freeze()
        self._is_frozen = True

    if not TYPE_CHECKING:  # hidden from type checkers, so that they report undeclared names

        def __setattr__(self, name: str, value: object) -> None:
            if name != "_is_frozen" and (self.__pydantic_private__ or {}).get("_is_frozen"):
                raise FrozenInstanceError(
                    f"{type(self).__name__}.{name}: the configuration of a run does not change; "
                    "fix: with_values() returns a copy"
                )
            super().__setattr__(name, value)

        def __getattr__(self, name: str) -> Any:
            if name in type(self).model_fields:
                raise MissingKeyError(f"{type(self).__name__}.{name} has no value: it was refused")
            return super().__getattr__(name)


# Values of ``Unused.set_by``: projects whose scripts set keys that have no effect here.
VERL = "verl's examples"
VERL_AGENT = "verl-agent's examples"


@dataclass(frozen=True, slots=True)
class Unused:
    """Annotation of a key that has no effect here, but that scripts of project ``set_by`` set.

    A key with ``instead`` (the key to set here) is refused, because in that project it changes
    tasks, training or rewards. A key without ``instead`` is ignored with a warning.
    """

    why: str
    set_by: str
    instead: str = ""


@dataclass(frozen=True, slots=True)
class GpuOnly:
    """Annotation of a key without effect on CPU."""


@dataclass(frozen=True, slots=True)
class NamesCode:
    """Annotation of a key whose value names code (file, module, command) or permits to run code.

    With ``only_import_paths`` plain names are not code, only MODULE:NAME and FILE.py:NAME.
    """

    only_import_paths: bool = False

    def names_code(self, value: object) -> bool:
        return ":" in str(value) if self.only_import_paths else bool(value)


class EnvSection(Section):
    """Settings of one environment, and properties of it that other sections depend on."""

    # Map from the dotted path of a key outside of ``env`` to the key of this section that gets its
    # value. It is empty unless tasks are the rows of ``data.train_files`` and ``data.val_files``.
    data_keys: ClassVar[Mapping[str, str]] = {}
    # True if the environment can drop tasks with too long prompts, or truncate prompts.
    can_drop_or_truncate_prompts: ClassVar[bool] = False

    def count_configured_tasks(self, split: str) -> int | None:
        """Return the number of tasks of ``split``; None if the settings do not determine it."""
        del split
        return None

    def count_needed_turns(self) -> int | None:
        """Return the least number of turns of an episode with a reward above 0.

        It must be at most ``env.max_steps``. None if the settings do not determine it.
        """
        return None

    def list_max_step_waits(self) -> Mapping[str, float]:
        """Return, by key, the longest wait in one environment step that the key allows (seconds).

        The waits must be less than ``env.step_timeout_s``, after which the whole worker is stopped.
        """
        return {}

    def get_files_key(self, split: str) -> str | None:
        """Return the key of this section that names a file of tasks of ``split``, or None."""
        del split
        return None


class ExtensibleSection(Section):
    """Section to which packages that import ``verl`` can add sections, as further attributes."""

    model_config = ConfigDict(extra="allow")

    def __getattr__(self, name: str) -> Any:
        sections = self.__pydantic_extra__ or {}
        if name not in sections:
            raise MissingKeyError(f"{type(self).__name__} has no {name!r}")
        return sections[name]

    if TYPE_CHECKING:  # tell type checkers that assignment to undeclared names is allowed

        def __setattr__(self, name: str, value: object) -> None: ...
