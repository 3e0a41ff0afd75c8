"""Limits of YAML files, checked before they are composed, and output of configs as YAML text.

A small file can expand to billions of values (by aliases), nest too deeply for a parser, or include
itself through its ``defaults`` list.

    NAME.yaml ──defaults──▶ files ──▶ each: bytes, depth, values with aliases expanded
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from verl.config.settings import ConfigError

# Limits of one YAML file: size, number of values with aliases expanded, nested sections.
MAX_BYTES = 2_000_000
MAX_VALUES = 20_000
MAX_DEPTH = 64
YAML_SUFFIX = ".yaml"
TOO_DEEP_MESSAGE = (
    f"more than {MAX_DEPTH} nested sections; allowed: {MAX_DEPTH} or fewer; fix: nest less deeply"
)
MOVE_DATA_FIX = "fix: move data into a separate file"
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass
class _NodeSize:
    """Number of values in a YAML node after aliases are expanded, and its nesting depth."""

    num_values: int = 1
    depth: int = 1


@dataclass
class _IncludedFiles:
    """Files that a config includes through its ``defaults`` list, and their contents by path."""

    directories: Sequence[Path]
    contents: dict[Path, dict[Any, Any]] = field(default_factory=dict)

    def add_file(self, file: Path, group: str, including_files: tuple[Path, ...]) -> None:
        if file in including_files:
            include_circle = " -> ".join(
                path.stem for path in (*including_files[including_files.index(file) :], file)
            )
            raise ConfigError(
                f"config {file.stem!r}: its defaults include the file itself ({include_circle}); "
                "allowed: defaults without a circle; fix: remove one of them from defaults "
                f"({including_files[-1]})",
                "unreadable_file",
            )
        if file in self.contents:
            return
        self.contents[file] = content = _read_content(file)
        for entry in _iterate_default_entries(content.get("defaults")):
            for included_file, included_group in self._find_file(entry, group):
                self.add_file(included_file, included_group, (*including_files, file))

    def _find_file(self, entry: str, group: str) -> Iterator[tuple[Path, str]]:
        """Yield the config file called ``entry`` and its config group; nothing if it is missing.

        The folder of ``group`` is searched first, and then the top folders of the configs.
        """
        names = [entry] if entry.startswith("/") or not group else [f"{group}/{entry}", entry]
        for name in names:
            for directory in self.directories:
                file = directory / f"{name.strip('/').removesuffix(YAML_SUFFIX)}{YAML_SUFFIX}"
                if file.is_file():
                    yield file, str(Path(name.strip("/")).parent).removeprefix(".")
                    return


def read_included_files(
    names: Sequence[str], directories: Sequence[Path]
) -> dict[Path, dict[Any, Any]]:
    """Return the files that configs of ``names`` include, with their contents.

    A file comes from the first of ``directories`` that has it. Raises ``ConfigError`` for a file
    above the limits, and for files that include each other in a circle. Other mistakes in files are
    reported by ``compose_tree``.
    """
    files = _IncludedFiles(directories)
    for name in names:
        for file, group in list(files._find_file(f"/{name}", "")):
            files.add_file(file, group, ())
    return files.contents


def _read_content(file: Path) -> dict[Any, Any]:
    try:
        with file.open(encoding="utf-8") as stream:
            content = parse_yaml(stream.read(MAX_BYTES + 1))
    except YamlLimitExceeded as error:
        raise ConfigError(f"config {file.stem!r}: {file}: {error}", "unreadable_file") from error
    except (OSError, ValueError, yaml.YAMLError):
        return {}  # compose_tree reports the error
    return content if isinstance(content, dict) else {}


class YamlLimitExceeded(ValueError):
    """Error for a YAML text above a limit of this module."""


class _UniqueKeyLoader(_Loader):
    """Safe loader that refuses a mapping with a repeated key."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in names:
                why = f"found duplicate key {key.value}"
                raise yaml.constructor.ConstructorError(None, None, why, key.start_mark)
            names.add(key.value)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> Any:
    """Parse YAML ``text``.

    Raises ``YamlLimitExceeded`` if it exceeds a limit of this module, and ``yaml.YAMLError``, also
    for a mapping that has a key twice.
    """
    if len(text) > MAX_BYTES:
        raise YamlLimitExceeded(f"more than {MAX_BYTES:,} bytes; allowed: fewer; {MOVE_DATA_FIX}")
    problem = find_exceeded_limit(text)
    if problem:
        raise YamlLimitExceeded(problem)
    loader = _UniqueKeyLoader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def find_exceeded_limit(text: str) -> str:
    """Return the limit that the YAML ``text`` exceeds, or ""; raise ``yaml.YAMLError``."""
    # Count brackets before parsing: the time of the parser grows with the cube of the depth.
    depth = 0
    for bracket in re.findall(r"[\[\]{}]", text):
        depth += 1 if bracket in "[{" else -1
        if depth > MAX_DEPTH:
            return TOO_DEEP_MESSAGE
    anchor_sizes: dict[str, _NodeSize] = {}
    open_nodes: list[tuple[str | None, _NodeSize]] = []
    root = _NodeSize()
    for event in yaml.parse(text, Loader=_Loader):
        size = _NodeSize()
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, size))
            if len(open_nodes) <= MAX_DEPTH:
                continue
            return TOO_DEEP_MESSAGE
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, size = open_nodes.pop()
            anchor_sizes |= {anchor: size} if anchor else {}
        elif isinstance(event, yaml.AliasEvent):
            if any(anchor == event.anchor for anchor, _ in open_nodes):
                why = f"*{event.anchor} is used inside of &{event.anchor}"
                return f"{why}; allowed: finite values; fix: write the value instead of the alias"
            size = anchor_sizes.get(event.anchor, size)
        elif isinstance(event, yaml.ScalarEvent):
            anchor_sizes |= {event.anchor: size} if event.anchor else {}
        else:
            continue
        parent_size = open_nodes[-1][1] if open_nodes else root
        parent_size.num_values += size.num_values
        parent_size.depth = max(parent_size.depth, size.depth + 1)
        if parent_size.num_values > MAX_VALUES:
            why = f"more than {MAX_VALUES:,} values, with aliases expanded"
            return f"{why}; allowed: {MAX_VALUES:,} or fewer; {MOVE_DATA_FIX}"
        if len(open_nodes) + size.depth > MAX_DEPTH:
            return TOO_DEEP_MESSAGE
    return ""


def _iterate_default_entries(defaults: object) -> Iterator[str]:
    """Yield the names in a ``defaults`` list, those of groups as GROUP/NAME."""
    for entry in defaults if isinstance(defaults, list) else ():
        if isinstance(entry, str):
            yield entry.partition("@")[0]
        elif isinstance(entry, dict):
            for key, value in entry.items():
                group = ["", *str(key).split()][-1].partition("@")[0]
                names = value if isinstance(value, list) else [value]
                yield from (f"{group}/{name}" for name in names)


# ---- writing -----------------------------------------------------------------------------------

# libyaml is ten times as fast as the Python dumper, which shortens --cfg job noticeably.
_Base: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Dumper(_Base):
    """YAML dumper that quotes strings which some parsers convert: 1e-6 to a number, n to False."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    should_quote = text.lower() in ("y", "n") or _is_number(text)
    quote_style = "'" if should_quote else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=quote_style)


def _is_number(text: str) -> bool:
    try:
        # float() accepts more texts than YAML 1.1; quoting too much does no harm.
        float(text)
    except ValueError:
        return False
    return True


_Dumper.add_representer(str, _represent_text)


def format_yaml(tree: Mapping[str, Any]) -> str:
    """Return ``tree`` as YAML, in the order of its keys."""
    return yaml.dump(
        dict(tree), Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False
    )
