"""Keys that do not exist: what they may have meant, and how that is said."""

import difflib
import fnmatch
from collections.abc import Mapping

from verl.config.settings.errors import Problem
from verl.config.settings.hints import nearest_name
from verl.config.settings.keys import Key

# Names here of keys of other projects, by pattern (``fnmatch``) of a path or of ``path=value``. The
# first match counts. ``verl.trainer.launch.extensions`` fills it.
MEANINGS: dict[str, str] = {}


def owner(path: str, keys: Mapping[str, Key]) -> Key | None:
    """The declared key that ``path`` names or lies below (in a free dictionary); None when there is
    none.
    """
    if path in keys:
        return keys[path]
    parts = path.split(".")
    for length in range(len(parts) - 1, 0, -1):
        key = keys.get(".".join(parts[:length]))
        if key is not None:
            return key if key.is_free else None
    return None


def children(path: str, keys: Mapping[str, Key]) -> list[str]:
    """Names directly below section ``path`` (empty: the root)."""
    prefix = f"{path}." if path else ""
    names = [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]
    return [name for name in names if "." not in name]


def nearest(path: str, keys: Mapping[str, Key]) -> str | None:
    """The declared key that was most likely meant: a similar sibling, the same name elsewhere, a
    similar path.
    """
    section, _, name = path.rpartition(".")
    # Within the section first: a slip of the finger is likelier than a wrong section.
    sibling = nearest_name(name, children(section, keys), cutoff=0.75)
    if sibling:
        return f"{section}.{sibling}" if section else sibling
    names = {key.rpartition(".")[2] for key in keys}
    similar = nearest_name(name, sorted(names), cutoff=0.75)
    if similar:
        candidates = [key for key in keys if key.rpartition(".")[2] == similar]
        return max(candidates, key=lambda key: _likeness(key, path) if section else 0)
    if children(section, keys):  # every path of a section resembles every other one
        return None
    return nearest_name(path, keys, cutoff=0.8)


def _likeness(key: str, path: str) -> float:
    return difflib.SequenceMatcher(None, key, path).ratio()


def meaning(path: str) -> str | None:
    """What does here what ``path`` (or ``path=value``) does elsewhere; None where nobody said."""
    found = (said for pattern, said in MEANINGS.items() if fnmatch.fnmatchcase(path, pattern))
    return next(found, None)


def unknown(path: str, value: object, keys: Mapping[str, Key]) -> Problem:
    """Return the message for a key that does not exist."""
    section = path.rpartition(".")[0]
    while section and not children(section, keys):
        section = section.rpartition(".")[0]
    meant = meaning(path)
    guess = None if meant else nearest(path, keys)
    hint = f"; did you mean {guess}?" if guess else ""
    fix = meant or (f"{guess}={value}" if guess else "leave it out")
    where = section or "the top level"
    names = ", ".join(children(section, keys))
    text = f"{path}={value!r}: unknown key{hint}; allowed in {where}: {names}; fix: {fix}"
    return Problem(text, "unknown_key")
