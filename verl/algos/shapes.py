"""Tensor types with shapes. In one call, a letter stands for the same size in all arguments.

B rows, R response positions, V vocabulary, N elements, T trajectories, S environment steps of all
rows. The unit tests check the shapes (``tests/helpers/shape_check.py``). At run time the types are
only documentation.
"""

from collections.abc import Hashable, Iterable
from typing import TypeAlias

import numpy as np
from jaxtyping import Float, Int, Num, Shaped
from torch import Tensor

PerToken = Float[Tensor, "B R"]
"""A number for every response position."""

TokenMask = Shaped[Tensor, "B R"]
"""Non-zero where the policy sampled the token; bool, int or float."""

TokenIndex = Int[Tensor, "B R"]
"""A whole number for every response position."""

PerPosition = Float[Tensor, "*shape"]
"""A number for every position, in any shape that is the same for all arguments."""

PerRow = Num[Tensor, " B"]
"""A number for every row."""

RowIndex = Int[Tensor, " B"]
"""The group or trajectory number of every row, from 0."""

PerTrajectory = Num[Tensor, " T"]
"""A number for every trajectory."""

TrajectoryIndex = Int[Tensor, " T"]
"""The group number of every trajectory, from 0."""

PerElement = Num[Tensor, " N"]
"""A number for every element of a list whose elements belong to groups."""

ElementIndex = Int[Tensor, " N"]
"""The group number of every element, from 0."""

PerStep = Float[Tensor, " S"]
"""A number for every environment step."""

Scalar = Shaped[Tensor, ""]
"""One number as a tensor without dimensions."""

Ids: TypeAlias = Iterable[Hashable] | Tensor | np.ndarray
"""Ids of groups, trajectories or states, one for each row."""
