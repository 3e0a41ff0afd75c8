"""Sections as typed values: what is accepted, what is refused, in which words, and what is kept."""

import pickle
from typing import Annotated, Literal

import pytest
from annotated_types import Ge, Le

from agent_system.environments.settings import EnvSettings
from tests.helpers.refusals import mentions
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.schema.tools import GenerationConfig
from verl.config.settings import (
    ConfigError,
    MissingKey,
    NonNegative,
    PositiveInt,
    Refusal,
    Section,
    Unused,
    keys_of,
    read_section,
    read_section_or_raise,
)
from verl.config.settings.reading import from_text


class Lake(EnvSettings):
    """A lake."""

    size: Annotated[int, Ge(3), Le(9)] = 4
    """cells per side
    of the lake"""
    share: NonNegative = 0.5
    """share of ice"""
    icy: bool = False
    """slippery"""
    mode: Literal["text", "image"] = "text"
    """what is seen"""
    room: tuple[Annotated[int, Ge(5)], Annotated[int, Ge(5)]] = (6, 6)
    """rows and columns"""
    url: str | None = None
    """a server"""


class Shore(Section):
    """A section in a section."""

    lake: Lake = Lake(size=5)
    """what is in the middle"""
    names: list[str] = ["a"]
    """names of the shore"""
    boats: Annotated[PositiveInt | None, Unused("nobody rows", "old logbooks")] = None
    """boats; null: none"""


def lake(section):
    return read_section_or_raise(Lake, section, "env.lake")


def test_values_are_taken_and_none_keeps_the_default():
    section = {"size": 5, "share": 1, "icy": True, "mode": None, "room": [5, 8], "url": "http://x"}
    expected = Lake(size=5, share=1.0, icy=True, mode="text", room=(5, 8), url="http://x")
    assert lake(section) == expected
    assert lake(None) == Lake()
    shared = {"max_steps": 9, "seed": 1, "placement": "thread"}
    assert lake(shared) == Lake(max_steps=9, seed=1, placement="thread")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"sise": 5}, r"env.lake.sise=5.*env.lake.size.*max_steps"),
        (
            {"wholly_other": 1},
            "env.lake.wholly_other=1.*env.lake.*max_steps",
        ),
        (
            {"size": 2},
            "env.lake.size=2.*int >= 3 and <= 9.*env.lake.size=4",
        ),
        ({"size": 10}, "env.lake.size=10"),
        ({"size": 4.5}, "env.lake.size=4.5"),
        ({"size": True}, "env.lake.size=True"),
        ({"size": "4"}, "env.lake.size='4'"),
        ({"icy": 1}, "env.lake.icy=1.*bool"),
        ({"share": -0.1}, "env.lake.share=-0.1.*float >= 0"),
        ({"mode": "video"}, "env.lake.mode='video'.*text, image"),
        ({"room": [6]}, r"env.lake.room=\[6\].*list of 2 int >= 5"),
        ({"room": [6, 4]}, "env.lake.room"),
        ({"room": "66"}, "env.lake.room"),
        ({"url": 8}, "env.lake.url=8.*str"),
        ({"placement": "moon"}, "env.lake.placement='moon'.*inline"),
    ],
)
def test_what_cannot_be_is_named(section, message):
    with pytest.raises(ConfigError, match=message):
        lake(section)


def test_every_mistake_is_named_and_what_is_sound_is_kept():
    reading = read_section(
        Shore, {"lake": {"size": 2, "sise": 1, "share": 0.25}, "names": 3, "boats": 2}
    )
    assert set(reading.problems) == {"lake.size", "lake.sise", "names"}
    shore = reading.section
    assert shore is not None
    assert shore.lake.share == 0.25 and shore.boats == 2
    for refused in (lambda: shore.lake.size, lambda: shore.names):
        with pytest.raises(MissingKey):
            refused()


def test_a_value_where_a_section_belongs_is_named():
    reading = read_section(Shore, {"lake": "deep"}, "shore")
    assert reading.problems["shore.lake"].endswith("set its keys: shore.lake.KEY=...")


class Pair(Section):
    """Two keys that must agree."""

    low: int = 1
    """the smaller one"""
    high: int = 2
    """the larger one"""

    def model_post_init(self, context):
        del context
        if self.low > self.high:
            raise Refusal("low", "above high", f"at most {self.high}", "lower it")


def test_a_section_that_contradicts_itself_says_which_key():
    with pytest.raises(ConfigError, check=mentions("pair.low=5", 2)):
        read_section_or_raise(Pair, {"low": 5}, "pair")


def test_defaults_of_one_instance_are_not_those_of_another():
    first = Shore()
    first.names.append("b")
    assert Shore().names == ["a"] and Shore().lake.size == 5


def test_keys_know_what_help_shows():
    keys = keys_of(Shore, "shore.")
    assert (
        keys["shore.lake"].is_section
        and keys["shore.lake.size"].describe_allowed() == "int >= 3 and <= 9"
    )
    assert keys["shore.lake.size"].help_text == "cells per side of the lake"
    assert keys["shore.lake.max_steps"].help_text.startswith("steps after which")
    assert keys["shore.boats"].unused_mark == Unused("nobody rows", "old logbooks")
    assert keys["shore.boats"].describe_allowed() == "int | None >= 1"


def test_text_of_files_is_translated_where_another_type_is_wanted():
    written = {"names": "b", "boats": "3", "lake": {"icy": "yes", "url": False, "room": [5, 5]}}
    shore = read_section_or_raise(Shore, from_text(written, Shore))
    assert shore.names == ["b"] and shore.boats == 3
    assert shore.lake == Lake(icy=True, room=(5, 5))


def test_settings_of_environments_are_values():
    settings = Lake(size=5, level_prompts={2: "look"})
    same = Lake(size=5, level_prompts={2: "look"})
    assert settings == same and hash(settings) == hash(same)
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert lake(settings.model_dump(mode="json")) == settings
    with pytest.raises(ValueError, match="frozen"):
        settings.size = 6


@pytest.mark.parametrize("written", ["inf", "-inf", "nan", "1e400", " Infinity "])
@pytest.mark.parametrize("schema", [PPOConfig, SFTConfig, GenerationConfig])
def test_no_key_takes_a_number_that_is_not_finite(schema, written):
    """Every key of the schema that holds numbers, alone, in a list or by name."""
    places = {"float": written, "list[float]": [written], "dict[str, float]": {"a": written}}
    keys = [key for key in keys_of(schema).values() if not key.is_section]
    tried = 0
    for key in keys:
        kind = next(
            (k for k in places if key.value_type.type_name.removesuffix(" | None") == k), None
        )
        if kind is None or key.unused_mark:
            continue
        value = float(written)
        for given in (written, value) if kind == "float" else ([value],) * (kind[0] == "l"):
            *parents, name = key.path.split(".")
            values = {name: given}
            for parent in reversed(parents):
                values = {parent: values}
            assert list(read_section(schema, from_text(values, schema)).problems) == [key.path]
        tried += 1
    assert tried > 1
