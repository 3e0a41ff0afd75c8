"""Bounds of YAML files, checked before they are read.

A small file can stand for billions of values, nest deeper than any parser goes, or join itself.

    NAME.yaml ──defaults──▶ files ──▶ each: bytes, depth, values with aliases filled in
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from verl.config.settings import ConfigError

MAX_BYTES = 2_000_000
MAX_VALUES = 20_000
MAX_DEPTH = 64
SUFFIX = ".yaml"
TOO_DEEP = (
    f"sections in sections, more than {MAX_DEPTH} deep; allowed: fewer; fix: nest less deeply"
)
MOVE_DATA = "fix: move data into a file of its own"
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass
class _Size:
    """Values in a node, aliases filled in, and how deep they nest."""

    values: int = 1
    depth: int = 1

    def add(self, other: "_Size") -> None:
        self.values += other.values
        self.depth = max(self.depth, other.depth + 1)


@dataclass
class _Files:
    """What was found below the first file, each with its content, in the order of reading."""

    dirs: Sequence[Path]
    found: dict[Path, dict[Any, Any]] = field(default_factory=dict)

    def add(self, file: Path, group: str, above: tuple[Path, ...]) -> None:
        if file in above:
            circle = " -> ".join(path.stem for path in (*above[above.index(file) :], file))
            raise ConfigError(
                f"config {file.stem!r}: its defaults lead back to it ({circle}); allowed: files "
                f"that join others; fix: take one of them out of its defaults ({above[-1]})"
            )
        if file in self.found:
            return
        self.found[file] = content = _content(file)
        for entry in _entries(content.get("defaults")):
            for below, where in self._files_of(entry, group):
                self.add(below, where, (*above, file))

    def _files_of(self, entry: str, group: str) -> Iterator[tuple[Path, str]]:
        """The first file of that name, seen from ``group`` or from the root."""
        names = [entry] if entry.startswith("/") or not group else [f"{group}/{entry}", entry]
        for name in names:
            for directory in self.dirs:
                file = directory / f"{name.strip('/').removesuffix(SUFFIX)}{SUFFIX}"
                if file.is_file():
                    yield file, str(Path(name.strip("/")).parent).removeprefix(".")
                    return


def joined_files(names: Sequence[str], dirs: Sequence[Path]) -> dict[Path, dict[Any, Any]]:
    """The files that configs of ``names`` are made of, found in the first of ``dirs`` that has
    them, with what they write.

    Raises ``ConfigError`` for a file that cannot be read in reasonable time, and for files that
    join each other in a circle. What else is wrong with one is said when it is composed.
    """
    files = _Files(dirs)
    for name in names:
        for file, group in list(files._files_of(f"/{name}", "")):
            files.add(file, group, ())
    return files.found


def _content(file: Path) -> dict[Any, Any]:
    if file.stat().st_size > MAX_BYTES:
        problem = f"has {file.stat().st_size:,} bytes; allowed: at most {MAX_BYTES:,}; {MOVE_DATA}"
        raise ConfigError(f"config {file.stem!r}: {file} {problem}")
    try:
        text = file.read_text(encoding="utf-8")
        problem = find_excess(text)
        content = None if problem else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError):
        return {}  # refused when it is composed
    if problem:
        raise ConfigError(f"config {file.stem!r}: {file}: {problem}")
    return content if isinstance(content, dict) else {}


def find_excess(text: str) -> str:
    """Return why the YAML ``text`` is refused before anything is made of it; empty where it is not.

    Raises ``yaml.YAMLError`` for text that is no YAML.
    """
    # Counted first: the time that the parser takes grows with the cube of the depth.
    depth = 0
    for bracket in re.findall(r"[\[\]{}]", text):
        depth += 1 if bracket in "[{" else -1
        if depth > MAX_DEPTH:
            return TOO_DEEP
    known: dict[str, _Size] = {}
    open_nodes: list[tuple[str | None, _Size]] = []
    root = _Size()
    for event in yaml.parse(text, Loader=_Loader):
        size = _Size()
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, size))
            if len(open_nodes) <= MAX_DEPTH:
                continue
            return TOO_DEEP
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, size = open_nodes.pop()
            known |= {anchor: size} if anchor else {}
        elif isinstance(event, yaml.AliasEvent):
            if any(anchor == event.anchor for anchor, _ in open_nodes):
                why = f"*{event.anchor} stands inside of &{event.anchor}"
                return f"{why}; allowed: values that end; fix: write the value out"
            size = known.get(event.anchor, size)
        elif isinstance(event, yaml.ScalarEvent):
            known |= {event.anchor: size} if event.anchor else {}
        else:
            continue
        above = open_nodes[-1][1] if open_nodes else root
        above.add(size)
        if above.values > MAX_VALUES:
            return (
                f"more than {MAX_VALUES:,} values, aliases filled in; allowed: fewer; {MOVE_DATA}"
            )
        if len(open_nodes) + size.depth > MAX_DEPTH:
            return TOO_DEEP
    return ""


def _entries(defaults: object) -> Iterator[str]:
    """The names in a ``defaults`` list, those of groups with their directory."""
    for entry in defaults if isinstance(defaults, list) else ():
        if isinstance(entry, str):
            yield entry.partition("@")[0]
        elif isinstance(entry, dict):
            for key, value in entry.items():
                group = str(key).split()[-1].partition("@")[0] if str(key).strip() else ""
                for name in value if isinstance(value, list) else [value]:
                    yield f"{group}/{name}"
