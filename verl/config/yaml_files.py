"""Limits of YAML files, checked before they are composed, and output of configs as YAML text.

A small file can expand to billions of values (by aliases), nest too deeply for a parser, or include
itself through its ``defaults`` list.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from verl.config.settings import ConfigError

MAX_YAML_BYTES = 2_000_000
MAX_YAML_VALUES = 20_000  # values of a YAML text, with aliases expanded
MAX_DEPTH = 64
TOO_DEEP_MESSAGE = (
    f"more than {MAX_DEPTH} nested sections; allowed: {MAX_DEPTH} or fewer; fix: nest less deeply"
)
MOVE_DATA_FIX = "fix: move data into a separate file"
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_included_files(
    names: Sequence[str], directories: Sequence[Path]
) -> dict[Path, dict[Any, Any]]:
    """Return the files that configs of ``names`` include, with their contents.

    Raises ``ConfigError`` for a file above the limits, and for files that include each other in a
    circle. Other mistakes in files are reported by ``compose_tree``.
    """
    contents_by_file: dict[Path, dict[Any, Any]] = {}

    def add_file(entry: str, group: str, including_files: tuple[Path, ...]) -> None:
        file, file_group = _find_file(entry, group, directories)
        if file is None:
            return
        if file in including_files:
            raise ConfigError(_format_circle(file, including_files), "unreadable_file")
        if file in contents_by_file:
            return
        contents_by_file[file] = content = _read_content(file)
        for included_entry in _iterate_default_entries(content.get("defaults")):
            add_file(included_entry, file_group, (*including_files, file))

    for name in names:
        add_file(name, "", ())
    return contents_by_file


def _find_file(entry: str, group: str, directories: Sequence[Path]) -> tuple[Path | None, str]:
    """Return the config file called ``entry`` (in ``group``, else at the top) and its group."""
    names = [entry] if entry.startswith("/") or not group else [f"{group}/{entry}", entry]
    for path in (Path(name.strip("/").removesuffix(".yaml")) for name in names):
        for directory in directories:
            file = directory / f"{path}.yaml"
            if file.is_file():
                return file, str(path.parent).removeprefix(".")
    return None, ""


def _format_circle(file: Path, including_files: tuple[Path, ...]) -> str:
    circle = (*including_files[including_files.index(file) :], file)
    return (
        f"config {file.stem!r}: its defaults include the file itself "
        f"({' -> '.join(path.stem for path in circle)}); allowed: defaults without a circle; "
        f"fix: remove one of them from defaults ({including_files[-1]})"
    )


def _read_content(file: Path) -> dict[Any, Any]:
    try:
        with file.open(encoding="utf-8") as stream:
            content = parse_yaml(stream.read(MAX_YAML_BYTES + 1))
    except YamlLimitError as error:
        raise ConfigError(f"config {file.stem!r}: {file}: {error}", "unreadable_file") from error
    except (OSError, ValueError, yaml.YAMLError):
        return {}  # compose_tree reports the error
    return content if isinstance(content, dict) else {}


class YamlLimitError(ValueError):
    """Error for a YAML text above a limit of this module."""


class _UniqueKeyLoader(_Loader):
    """Safe loader that refuses a mapping with a repeated key."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen_keys: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen_keys:
                why = f"found duplicate key {key.value}"
                raise yaml.constructor.ConstructorError(None, None, why, key.start_mark)
            seen_keys.add(key.value)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> Any:
    """Parse YAML ``text``.

    Raises ``YamlLimitError`` if it exceeds a limit of this module, and ``yaml.YAMLError``, also
    for a mapping that has a key twice.
    """
    if len(text) > MAX_YAML_BYTES:
        raise YamlLimitError(f"more than {MAX_YAML_BYTES:,} bytes; allowed: fewer; {MOVE_DATA_FIX}")
    _check_limits(text)
    loader = _UniqueKeyLoader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _check_limits(text: str) -> None:
    # Count brackets before parsing: the time of the parser grows with the cube of the depth.
    depth = 0
    for bracket in re.findall(r"[\[\]{}]", text):
        depth += 1 if bracket in "[{" else -1
        if depth > MAX_DEPTH:
            raise YamlLimitError(TOO_DEEP_MESSAGE)
    counts_by_anchor: dict[str | None, int] = {}  # numbers of values, with aliases expanded
    open_anchors: list[str | None] = []
    open_value_counts = [0]  # of the document, and of each open section or list
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            open_anchors.append(event.anchor)
            open_value_counts.append(1)
            if len(open_anchors) > MAX_DEPTH:
                raise YamlLimitError(TOO_DEEP_MESSAGE)
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            num_values = open_value_counts.pop()
            counts_by_anchor[open_anchors.pop()] = num_values
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor in open_anchors:
                why = f"*{event.anchor} is used inside of &{event.anchor}"
                fix = "fix: write the value instead of the alias"
                raise YamlLimitError(f"{why}; allowed: finite values; {fix}")
            num_values = counts_by_anchor.get(event.anchor, 1)
        elif isinstance(event, yaml.ScalarEvent):
            num_values = counts_by_anchor[event.anchor] = 1
        else:
            continue
        open_value_counts[-1] += num_values
        if open_value_counts[-1] > MAX_YAML_VALUES:
            why = f"more than {MAX_YAML_VALUES:,} values, with aliases expanded"
            raise YamlLimitError(f"{why}; allowed: {MAX_YAML_VALUES:,} or fewer; {MOVE_DATA_FIX}")


def _iterate_default_entries(defaults: object) -> Iterator[str]:
    """Yield the names in a ``defaults`` list, those of groups as GROUP/NAME."""
    for entry in defaults if isinstance(defaults, list) else ():
        if isinstance(entry, str):
            yield entry.partition("@")[0]
        elif isinstance(entry, dict):
            for key, value in entry.items():
                group = ["", *str(key).split()][-1].partition("@")[0]
                file_names = value if isinstance(value, list) else [value]
                yield from (f"{group}/{name}" for name in file_names)


# ---- writing -----------------------------------------------------------------------------------

# libyaml is ten times as fast as the Python dumper, which shortens --cfg job noticeably.
_BaseDumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Dumper(_BaseDumper):
    """YAML dumper that quotes strings which some parsers convert: 1e-6 to a number, n to False."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    should_quote = text.lower() in ("y", "n")
    with contextlib.suppress(ValueError):
        # float() accepts more texts than YAML 1.1; quoting too much does no harm.
        float(text)
        should_quote = True
    quote_style = "'" if should_quote else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=quote_style)


_Dumper.add_representer(str, _represent_text)


def format_yaml(tree: Mapping[str, Any]) -> str:
    """Return ``tree`` as YAML, in the order of its keys."""
    return yaml.dump(
        dict(tree), Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False
    )
