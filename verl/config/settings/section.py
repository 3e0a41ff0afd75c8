"""What a section is: a pydantic model whose attribute docstrings are the help text.

A section of one's own::

    class LakeSettings(Section):
        \"\"\"How the lake looks.\"\"\"

        size: Annotated[int, Ge(3), Le(16)] = 4
        \"\"\"cells per side\"\"\"
        frozen: Share = 0.8
        \"\"\"share of the cells that is ice\"\"\"
"""

import copy
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Optional, Self, TypeVar

from annotated_types import Ge, Le
from pydantic import BaseModel, ConfigDict, PrivateAttr

from verl.config.settings.errors import MissingKey

PositiveInt = Annotated[int, Ge(1)]
NonNegativeInt = Annotated[int, Ge(0)]
# Below 2**31: torch, numpy and vLLM take them, also with the number of a rank or engine added.
Seed = Annotated[int, Ge(0), Le(2**31 - 1)]
NonNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]
NULL: Any = None  # the default of a derived key

if TYPE_CHECKING:
    T = TypeVar("T")
    Derived = Annotated[T, "filled in before anybody reads it"]
else:

    class Derived:
        """``Derived[int]``: null until it is filled in from other keys; whoever is handed a config
        reads a value.
        """

        def __class_getitem__(cls, kind: object) -> object:
            return Optional[kind]  # noqa: UP045  kind may be any type expression


class Section(BaseModel):
    """A group of keys. Values are checked when it is made, not when they are assigned.

    Types are taken at their word: ``true`` is no number and ``"4"`` no integer; a number is
    finite. Text that files and command lines write for other types is translated by
    ``verl.config.settings.reading``.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    _is_frozen: bool = PrivateAttr(default=False)

    def as_frozen(self) -> Self:
        """Return a deep copy to whose keys nothing can be assigned; ``self`` where it is one."""
        return self if (self.__pydantic_private__ or {}).get("_is_frozen") else self.with_values({})

    def with_values(self, values: Mapping[str, object]) -> Self:
        """Return a frozen deep copy with ``values`` at these dotted paths."""
        made = self.model_copy(deep=True)
        made._freeze(False)
        for path, value in values.items():
            section: Any = made
            *above, name = path.split(".")
            for part in above:
                section = getattr(section, part)
            setattr(section, name, copy.deepcopy(value))
        made._freeze(True)
        return made

    def __eq__(self, other: object) -> bool:
        """Compare the values; a frozen copy equals what it was made of."""
        if not isinstance(other, Section) or type(self) is not type(other):
            return NotImplemented
        extra = self.__pydantic_extra__ == other.__pydantic_extra__
        return extra and vars(self) == vars(other)

    def _freeze(self, frozen: bool) -> None:
        for value in (*vars(self).values(), *(self.__pydantic_extra__ or {}).values()):
            if isinstance(value, Section):
                value._freeze(frozen)
        self._is_frozen = frozen

    if not TYPE_CHECKING:  # for a type checker, a name that is not declared is a mistake

        def __setattr__(self, name: str, value: Any) -> None:
            if name != "_is_frozen" and (self.__pydantic_private__ or {}).get("_is_frozen"):
                raise FrozenInstanceError(
                    f"{type(self).__name__}.{name}: the configuration of a run does not change; "
                    "fix: with_values() returns a copy"
                )
            super().__setattr__(name, value)

        def __getattr__(self, name: str) -> Any:
            if name in type(self).model_fields:
                raise MissingKey(f"{type(self).__name__}.{name} has no value: it was refused")
            return super().__getattr__(name)


@dataclass(frozen=True, slots=True)
class Unused:
    """Marks a key that changes nothing here: ``why``, and whose scripts set it, ``carried_by``.

    One that is passed over with a note has no ``instead``; where it would change what is played,
    learnt or paid, it is refused, and ``instead`` says what to set.
    """

    why: str
    carried_by: str
    instead: str = ""


@dataclass(frozen=True, slots=True)
class GpuOnly:
    """Marks a key that changes nothing on CPU."""


@dataclass(frozen=True, slots=True)
class RunsCode:
    """Marks a key whose value is code to execute: a file, a module, a command or the permission.

    ``by_place``: of other names too, so that only a place (MODULE:NAME, FILE.py:NAME) is code.
    """

    by_place: bool = False

    def in_value(self, value: object) -> bool:
        """Tell whether ``value`` names code."""
        return ":" in str(value) if self.by_place else bool(value)


class OpenSection(Section):
    """A section with further sections, which packages above ``verl`` declare.

    They are attributes like the declared ones. ``verl.config.load`` reads and checks them.
    """

    model_config = ConfigDict(extra="allow")

    def __getattr__(self, name: str) -> Any:
        """Return the section ``name``, whose type is known where it is declared."""
        found = self.__pydantic_extra__ or {}
        if name not in found:
            raise MissingKey(f"{type(self).__name__} has no {name!r}")
        return found[name]

    if TYPE_CHECKING:  # pydantic's own, for names that no class declares

        def __setattr__(self, name: str, value: Any) -> None: ...
