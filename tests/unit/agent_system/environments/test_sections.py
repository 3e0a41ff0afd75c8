"""Sections as typed settings: what is accepted, what is refused, and in which words."""

from dataclasses import dataclass

import pytest
from agent_system.environments.sections import read_section, setting


@dataclass(frozen=True)
class Lake:
    size: int = setting(4, low=3, high=9)
    share: float = setting(0.5, low=0)
    icy: bool = setting(False)
    mode: str = setting("text", choices=("text", "image"))
    room: tuple[int, int] = setting((6, 6), low=5)
    url: str | None = setting(None)


def test_values_are_taken_and_none_keeps_the_default():
    section = {"size": 5, "share": 1, "icy": True, "mode": None, "room": [5, 8], "url": "http://x"}
    assert read_section(Lake, section, "lake") == Lake(5, 1, True, "text", (5, 8), "http://x")
    assert read_section(Lake, None, "lake") == Lake()
    assert read_section(Lake, {"max_steps": 9, "seed": 1, "placement": "thread"}, "lake") == Lake()


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"sise": 5},
            r"env.lake.sise=5: unknown key; did you mean size\? there are: size, share, icy, mode, room",
        ),
        ({"wholly_other": 1}, "env.lake.wholly_other=1: unknown key; there are: size"),
        ({"size": 2}, "env.lake.size=2: allowed: int >= 3 <= 9; the default is 4"),
        ({"size": 10}, "env.lake.size=10"),
        ({"size": 4.5}, "env.lake.size=4.5"),
        ({"size": True}, "env.lake.size=True"),
        ({"size": "4"}, "env.lake.size='4'"),
        ({"icy": 1}, "env.lake.icy=1: allowed: bool"),
        ({"share": -0.1}, "env.lake.share=-0.1: allowed: float >= 0"),
        ({"mode": "video"}, "env.lake.mode='video': allowed: one of text, image"),
        ({"room": [6]}, r"env.lake.room=\(6,\): allowed: list of 2 int >= 5"),
        ({"room": [6, 4]}, "env.lake.room"),
        ({"room": "66"}, "env.lake.room"),
        ({"url": 8}, "env.lake.url=8: allowed: str"),
    ],
)
def test_what_cannot_be_is_named(section, message):
    with pytest.raises(ValueError, match=message):
        read_section(Lake, section, "lake")
