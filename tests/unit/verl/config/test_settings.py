"""Typed sections: accepted values, refused values with their messages, and partial reading."""

import pickle
from typing import Annotated, Literal

import pytest
from annotated_types import Ge, Gt, Le
from pydantic import ValidationError

from agent_system.environments.settings import EnvSettings
from tests.helpers.refusals import has_problem, mentions
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.schema.tools import GenerationConfig
from verl.config.settings import (
    ConfigError,
    InvalidSettingError,
    MissingKeyError,
    NonNegative,
    PositiveInt,
    Section,
    Unused,
    collect_section_keys,
    read_section,
    read_section_or_raise,
)
from verl.config.settings.reading import convert_text_values


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
    depth: Annotated[float, Gt(0), Le(3)] | None = None
    """metres of water"""
    boats: Annotated[PositiveInt | None, Unused("nobody rows", "old logbooks")] = None
    """boats; null: none"""


def read_lake(section):
    return read_section_or_raise(Lake, section, "env.lake")


def test_valid_values_are_read_and_none_keeps_the_default():
    section = {"size": 5, "share": 1, "icy": True, "mode": None, "room": [5, 8], "url": "http://x"}
    expected = Lake(size=5, share=1.0, icy=True, mode="text", room=(5, 8), url="http://x")
    assert read_lake(section) == expected
    assert read_lake(None) == Lake()
    shared = {"max_steps": 9, "seed": 1, "placement": "thread"}
    assert read_lake(shared) == Lake(max_steps=9, seed=1, placement="thread")


@pytest.mark.parametrize(
    ("section", "code", "parts"),
    [
        ({"sise": 5}, "unknown_key", ["env.lake.size=5", "max_steps"]),
        ({"wholly_other": 1}, "unknown_key", ["env.lake", "max_steps"]),
        ({"size": 2}, "out_of_range", ["int >= 3 and <= 9", "env.lake.size=4"]),
        ({"size": 10}, "out_of_range", []),
        ({"size": 4.5}, "wrong_type", []),
        ({"size": True}, "wrong_type", []),
        ({"size": "4"}, "wrong_type", []),
        ({"icy": 1}, "wrong_type", ["bool"]),
        ({"share": -0.1}, "out_of_range", ["float >= 0"]),
        ({"mode": "video"}, "out_of_range", ["text, image"]),
        ({"room": [6]}, "out_of_range", ["list of 2 int >= 5"]),
        ({"room": [6, 4]}, "out_of_range", []),
        ({"room": "66"}, "wrong_type", []),
        ({"url": 8}, "wrong_type", ["str"]),
        ({"placement": "moon"}, "out_of_range", ["inline"]),
    ],
)
def test_invalid_value_is_named(section, code, parts):
    ((name, value),) = section.items()
    expected = has_problem(code, f"env.lake.{name}", f"env.lake.{name}={value!r}", *parts)
    with pytest.raises(ConfigError, check=expected):
        read_lake(section)


def test_every_problem_is_named_and_valid_values_are_kept():
    reading = read_section(
        Shore, {"lake": {"size": 2, "sise": 1, "share": 0.25}, "names": 3, "boats": 2}
    )
    assert set(reading.problems) == {"lake.size", "lake.sise", "names"}
    shore = reading.section
    assert shore is not None
    assert shore.lake.share == 0.25 and shore.boats == 2
    for refused in (lambda: shore.lake.size, lambda: shore.names):
        with pytest.raises(MissingKeyError):
            refused()


def test_value_in_place_of_a_section_is_named():
    reading = read_section(Shore, {"lake": "deep"}, "shore")
    problem = reading.problems["shore.lake"]
    assert problem.code == "wrong_type" and problem.endswith("shore.lake.KEY=...")


class Pair(Section):
    """Two keys that must agree."""

    low: int = 1
    """the smaller one"""
    high: int = 2
    """the larger one"""

    def model_post_init(self, context):
        del context
        if self.low > self.high:
            raise InvalidSettingError("low", "above high", f"at most {self.high}", "lower it")


def test_section_that_contradicts_itself_names_the_key():
    with pytest.raises(ConfigError, check=mentions("pair.low=5", 2)):
        read_section_or_raise(Pair, {"low": 5}, "pair")


def test_defaults_are_not_shared_between_instances():
    first = Shore()
    first.names.append("b")
    assert Shore().names == ["a"] and Shore().lake.size == 5


def test_keys_carry_the_texts_of_help():
    keys = collect_section_keys(Shore, "shore.")
    assert (
        keys["shore.lake"].is_section
        and keys["shore.lake.size"].describe_allowed() == "int >= 3 and <= 9"
    )
    assert keys["shore.lake.size"].help_text == "cells per side of the lake"
    assert keys["shore.lake.max_steps"].help_text.startswith("steps after which")
    assert keys["shore.boats"].unused_annotation == Unused("nobody rows", "old logbooks")
    assert keys["shore.boats"].describe_allowed() == "int >= 1 or null"
    assert keys["shore.depth"].describe_allowed() == "float > 0 and <= 3 or null"


def test_texts_from_files_are_converted_to_the_type_of_the_key():
    texts = {"names": "b", "boats": "3", "lake": {"icy": "yes", "url": False, "room": [5, 5]}}
    shore = read_section_or_raise(Shore, convert_text_values(texts, Shore))
    assert shore.names == ["b"] and shore.boats == 3
    assert shore.lake == Lake(icy=True, room=(5, 5))


def test_home_directory_is_expanded_in_texts_and_lists(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    texts = {"names": ["~/a b", "c~/d"], "lake": {"url": "~/e"}}
    shore = read_section_or_raise(Shore, convert_text_values(texts, Shore))
    assert shore.names == ["/home/me/a b", "c~/d"] and shore.lake.url == "/home/me/e"


def test_environment_settings_are_hashable_values():
    settings = Lake(size=5, level_prompts={2: "look"})
    same = Lake(size=5, level_prompts={2: "look"})
    assert settings == same and hash(settings) == hash(same)
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert read_lake(settings.model_dump(mode="json")) == settings
    with pytest.raises(ValidationError):
        settings.size = 6


@pytest.mark.parametrize("written", ["inf", "-inf", "nan", "1e400", " Infinity "])
@pytest.mark.parametrize("schema", [PPOConfig, SFTConfig, GenerationConfig])
def test_no_key_accepts_a_non_finite_number(schema, written):
    """Check every numeric key of the schema: a number, a list of numbers, or numbers by name."""
    values_by_type = {
        "float": written,
        "list[float]": [written],
        "dict[str, float]": {"a": written},
    }
    keys = [key for key in collect_section_keys(schema).values() if not key.is_section]
    tried = 0
    for key in keys:
        kind = next(
            (k for k in values_by_type if key.value_type.type_name.removesuffix(" | None") == k),
            None,
        )
        if kind is None or key.unused_annotation:
            continue
        value = float(written)
        for candidate in (written, value) if kind == "float" else ([value],) * (kind[0] == "l"):
            *parents, name = key.path.split(".")
            values = {name: candidate}
            for parent in reversed(parents):
                values = {parent: values}
            assert list(read_section(schema, convert_text_values(values, schema)).problems) == [
                key.path
            ]
        tried += 1
    assert tried > 1


def test_key_without_default_must_be_set():
    class Pier(Section):
        """A pier."""

        length: PositiveInt
        """metres"""

    (problem,) = read_section(Pier, {}, "pier").problems.values()
    assert problem.code == "missing_key" and problem.startswith("pier.length: ")
    assert "int >= 1" in problem and problem.endswith("fix: pier.length=VALUE")
    assert read_section_or_raise(Pier, {"length": 3}).length == 3
