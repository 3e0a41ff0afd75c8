"""Shapes of the maths' arguments; one letter means one number throughout a call.

S steps of all rows, B rows, R response positions. The unit tests check them; at run time they are
documentation. The second dimension of ``PerLevel`` is 4, which the functions check themselves.
"""

from collections.abc import Hashable, Iterable
from typing import TypeAlias

import numpy as np
from jaxtyping import Bool, Float, Int, Num, Shaped
from torch import Tensor

PerLevel: TypeAlias = Num[Tensor, "S _"]
"""A number for every step and level; level k is column k - 1."""

LevelMask: TypeAlias = Shaped[Tensor, "S _"]
"""Which of the contexts exist; bool, int or float."""

PerStep: TypeAlias = Num[Tensor, " S"]
"""A number for every step."""

StepMask: TypeAlias = Bool[Tensor, " S"]
"""Which steps count."""

Column: TypeAlias = Int[Tensor, " S"]
"""The column of a level for every step, -1 where the step could not be parsed."""

PerToken: TypeAlias = Float[Tensor, "B R"]
"""A number for every response position."""

TokenMask: TypeAlias = Shaped[Tensor, "B R"]
"""Non-zero where the policy sampled the token; bool, int or float."""

RowMask: TypeAlias = Bool[Tensor, " B"]
"""Which rows count."""

Ids: TypeAlias = Iterable[Hashable] | Tensor | np.ndarray
"""Names of groups or trajectories, one for each row or step."""
