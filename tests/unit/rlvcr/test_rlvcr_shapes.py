"""The tensor shapes that the method's functions declare are checked while the tests run."""

import pytest
import torch
from jaxtyping import TypeCheckError

from rlvcr.core_rlvcr import combine_advantages
from rlvcr.thinking import compute_level_count_bonus, compute_thinking_advantage

SCORES = torch.tensor([[0.0, 1.0, 2.0, 3.0], [3.0, 2.0, 1.0, 0.0]])
ALL = torch.ones(2, 4).bool()
FREE = torch.zeros(2, 4)


def test_wrong_shape_or_type_per_turn_is_refused():
    compute_thinking_advantage(SCORES, ALL, torch.tensor([0, 1]), FREE)
    with pytest.raises(TypeCheckError):
        compute_thinking_advantage(SCORES, ALL, torch.tensor([0]), FREE)
    with pytest.raises(TypeCheckError):
        compute_level_count_bonus(torch.tensor([0.5, 1.0]), ["a", "a"])


def test_different_shapes_of_advantages_are_refused():
    wide = torch.zeros(2, 3)
    combine_advantages(wide, wide, 1.0)
    with pytest.raises(TypeCheckError):
        combine_advantages(wide, torch.zeros(2, 4), 1.0)
    with pytest.raises(TypeCheckError):
        combine_advantages(wide, wide, 1.0, "success", torch.ones(3).bool())
