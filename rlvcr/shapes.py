"""Types of tensor arguments, with their shapes. In one call, a letter stands for one size.

S: turns of all rows; B: rows; R: response positions. Only the unit tests check these shapes. The
second dimension of ``PerLevel`` is 4, which the functions check.
"""

from collections.abc import Hashable, Iterable
from typing import TypeAlias

import numpy as np
from jaxtyping import Bool, Float, Int, Num, Shaped
from torch import Tensor

PerLevel: TypeAlias = Num[Tensor, "S _"]
"""One number for every turn and level; level k is column k - 1."""

LevelMask: TypeAlias = Shaped[Tensor, "S _"]
"""Non-zero where a turn has a score at the level; bool, int or float."""

PerTurn: TypeAlias = Num[Tensor, " S"]
"""One number for every turn."""

TurnMask: TypeAlias = Bool[Tensor, " S"]
"""True for the turns that a computation uses."""

LevelColumn: TypeAlias = Int[Tensor, " S"]
"""Column of a level for every turn, -1 where the turn could not be parsed."""

PerToken: TypeAlias = Float[Tensor, "B R"]
"""One number for every response position."""

TokenMask: TypeAlias = Shaped[Tensor, "B R"]
"""Non-zero where the policy sampled the token; bool, int or float."""

RowMask: TypeAlias = Bool[Tensor, " B"]
"""True for the rows that a computation uses."""

Ids: TypeAlias = Iterable[Hashable] | Tensor | np.ndarray
"""Identifiers of groups or trajectories, one for each row or turn."""
