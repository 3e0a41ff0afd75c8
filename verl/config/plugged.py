"""What packages outside of this room add to the configuration, so that it knows none of them.

``verl.trainer.launch.extensions`` plugs in the environments and the method. Without it, the
schema is what ``schema/`` declares.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from verl.config.problems import Context, Problems
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.settings import Key, Section, keys_of, plugged_key
from verl.config.settings.section import OpenSection
from verl.config.settings.unknown import MEANINGS


class SectionSource(Protocol):
    """The sections that may stand below one section of the schema, by name."""

    def names(self) -> Collection[str]:
        """Every name that may be written."""
        ...

    def section(self, name: str) -> type[Section] | None:
        """The class of section ``name``; None where there is none, or its package is missing."""
        ...

    def present(self, values: Mapping[str, Any]) -> Collection[str]:
        """Names that are there even where nothing is written below them; ``values`` are those of
        the section above.
        """
        ...


def _nothing_to_derive(_cfg: PPOConfig | SFTConfig) -> None:
    pass


def _nothing_to_say(_cfg: PPOConfig | SFTConfig, _ctx: Context) -> Problems:
    return iter(())


def _nothing_to_settle(_tree: dict[str, Any], _schema: type[Section]) -> None:
    pass


def _no_columns(_cfg: PPOConfig) -> Mapping[str, str]:
    return {}


def _no_stand_in(_cfg: PPOConfig | SFTConfig) -> str:
    return ""


def _nothing_foreign(_tree: Mapping[str, Any], _written: Collection[str]) -> Problems:
    return iter(())


def _no_tokens(_cfg: PPOConfig, _steps: int) -> Mapping[str, int]:
    return {}


@dataclass(frozen=True)
class Extension:
    """What one package adds.

    ``sources`` maps a section of the schema to the sections that may stand below it, ``keys`` to
    keys that stand there beside the declared ones (the section must be an ``OpenSection``).
    ``settle`` is handed what files and command line write, before anything is read, and may write
    what follows from it. ``derive`` fills in values that follow from others, ``check`` finds
    combinations that cannot work. ``columns`` are columns of the batch, each with "" where the
    config gives it, else how to get it. ``sampled_tokens`` counts, by what they are of, the tokens
    that are sampled besides the turns of so many steps, at most.
    ``stand_in`` says what is played in place of what the config names, where that is so.
    ``check_written`` finds keys of no use among those that the caller wrote, by dotted path.
    ``meanings`` say what keys of other projects are called here, by pattern.
    """

    name: str
    sources: Mapping[str, SectionSource] = field(default_factory=dict)
    keys: Mapping[str, type[Section]] = field(default_factory=dict)
    settle: Callable[[dict[str, Any], type[Section]], None] = _nothing_to_settle
    derive: Callable[[PPOConfig | SFTConfig], None] = _nothing_to_derive
    check: Callable[[PPOConfig | SFTConfig, Context], Problems] = _nothing_to_say
    columns: Callable[[PPOConfig], Mapping[str, str]] = _no_columns
    sampled_tokens: Callable[[PPOConfig, int], Mapping[str, int]] = _no_tokens
    stand_in: Callable[[PPOConfig | SFTConfig], str] = _no_stand_in
    check_written: Callable[[Mapping[str, Any], Collection[str]], Problems] = _nothing_foreign
    meanings: Mapping[str, str] = field(default_factory=dict)


# In the order of plugging, which is the order in which they derive and check.
EXTENSIONS: dict[str, Extension] = {}


def plug(extension: Extension) -> None:
    """Add ``extension``, or put it in the place of the one with the same name."""
    EXTENSIONS[extension.name] = extension
    MEANINGS.update(extension.meanings)


def sources(schema: type[Section]) -> Iterator[tuple[str, SectionSource]]:
    """The plugged sources of the sections that ``schema`` has, by section."""
    for extension in EXTENSIONS.values():
        for path, source in extension.sources.items():
            # SFTConfig has no algorithm section: what a method adds there does not concern it.
            if path in schema.model_fields:
                yield path, source


def plugged_names(schema: type[Section], above: str) -> set[str]:
    """Names of the sections that may be written below ``above`` besides the declared ones."""
    return {name for path, source in sources(schema) if path == above for name in source.names()}


def plugged_keys(schema: type[Section]) -> Iterator[tuple[str, type[Section]]]:
    """The keys that stand in the open sections of ``schema`` besides the declared ones."""
    for extension in EXTENSIONS.values():
        for path, keys in extension.keys.items():
            declared = keys_of(schema).get(path)
            # One name may be open in one schema and closed in the other, as data is.
            if declared and declared.section and issubclass(declared.section, OpenSection):
                yield path, keys


def plugged_class(schema: type[Section], path: str) -> type[Section] | None:
    """The class of the plugged section at dotted ``path``; None where none is plugged in."""
    above, _, name = path.partition(".")
    for section, source in sources(schema):
        if section == above and name in source.names():
            return source.section(name)
    return None


def light_keys(schema: type[Section]) -> Mapping[str, Key]:
    """The keys and sections that are known without importing a plugged section, by dotted path."""
    keys = dict(keys_of(schema))
    for section, plugged in plugged_keys(schema):
        keys.update(keys_of(plugged, f"{section}."))
    return keys


def schema_keys(schema: type[Section]) -> Mapping[str, Key]:
    """All keys and sections by dotted path, those of every plugged section included."""
    keys = dict(light_keys(schema))
    for section, source in sources(schema):
        for name in source.names():
            found = source.section(name)
            # None: a package that the section needs is missing, so that nobody knows its keys.
            if found is not None:
                keys[f"{section}.{name}"] = plugged_key(f"{section}.{name}", found)
                keys.update(keys_of(found, f"{section}.{name}."))
    return keys
