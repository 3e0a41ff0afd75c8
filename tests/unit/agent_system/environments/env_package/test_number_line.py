"""Test of the compact prompts of the number line."""

import pytest

from agent_system.environments.env import Observation
from agent_system.environments.env_package.number_line.package import PACKAGE


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("You are at 3. The target is 16.", "at 3, target 13 right"),
        ("Nothing happens. You are at 9. The target is 8.", "Nothing happens. at 9, target 1 left"),
        ("something else", "something else"),
    ],
)
def test_compact_prompts_give_distance_and_direction(text, short):
    prompts = PACKAGE.prompts(PACKAGE.read_settings({"prompt": "compact"}))
    assert prompts.turn(Observation(text)) == prompts.first(Observation(text), True) == short
