"""Suggestions in error messages: the valid name that is most similar to a wrong one."""

import difflib
import fnmatch
from collections import Counter
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher

from verl.config.settings.errors import Problem
from verl.config.settings.keys import Key

# Map from settings of other projects to the equivalent settings here. A key is an ``fnmatch``
# pattern of a path or of ``path=value``. The first matching pattern counts.
# ``verl.trainer.launch.extensions`` fills this dictionary.
EQUIVALENT_SETTINGS: dict[str, str] = {}


def nearest_name(name: str, valid_names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the name in ``valid_names`` that is most similar to ``name``.

    None if no similarity reaches ``cutoff`` (0: anything matches, 1: only an equal name). Upper and
    lower case count as equal. Among equally similar names, one with the same letters in another
    order is preferred, then one with the same first letter.
    """
    names = {valid_name.lower(): valid_name for valid_name in valid_names}
    name = name.lower()
    similar_names = difflib.get_close_matches(name, names, n=len(names) or 1, cutoff=cutoff)

    def rank_candidate(candidate: str) -> tuple[float, bool, bool]:
        similarity = SequenceMatcher(None, candidate, name).ratio()
        return similarity, sorted(candidate) == sorted(name), candidate[:1] == name[:1]

    return names[max(similar_names, key=rank_candidate)] if similar_names else None


def did_you_mean(name: str, valid_names: Iterable[str]) -> str:
    """Return ``"; did you mean 'right'?"``, or the empty string if no name is similar."""
    similar_name = nearest_name(name, valid_names)
    return f"; did you mean {similar_name!r}?" if similar_name else ""


def find_containing_key(path: str, keys: Mapping[str, Key]) -> Key | None:
    """Return the declared key at ``path`` or the dictionary key that contains it, else None."""
    if path in keys:
        return keys[path]
    while "." in path:
        path = path.rpartition(".")[0]
        if path in keys:
            return keys[path] if keys[path].allows_any_key else None
    return None


def list_child_names(path: str, keys: Mapping[str, Key]) -> list[str]:
    """Return the names directly below section ``path`` (empty: the root)."""
    prefix = f"{path}." if path else ""
    names = [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]
    return [name for name in names if "." not in name]


def find_nearest_key(path: str, keys: Mapping[str, Key]) -> str | None:
    """Return the declared key most similar to the unknown key ``path``, or None."""
    section, _, name = path.rpartition(".")
    # Search the same section first: a typing error is more likely than a wrong section.
    similar_sibling = nearest_name(name, list_child_names(section, keys), cutoff=0.75)
    if similar_sibling:
        return f"{section}.{similar_sibling}" if section else similar_sibling
    candidates = _select_candidates(path, keys)
    similar_name = nearest_name(name, sorted(map(_get_last_name, candidates)), cutoff=0.75)
    if similar_name:
        candidates = [key for key in candidates if _get_last_name(key) == similar_name]
        if not section:
            return candidates[0]
        return max(candidates, key=lambda key: SequenceMatcher(None, key, path).ratio())
    # Suggest nothing if the section exists: all of its paths are about equally similar to ``path``.
    if list_child_names(section, keys):
        return None
    return nearest_name(path, keys, cutoff=0.8)


def _select_candidates(path: str, keys: Mapping[str, Key]) -> list[str]:
    """Return the keys, in any section, that the unknown key ``path`` may mean.

    A key of another top-level section needs a unique name (not ``enable`` or ``lr``), or must be in
    a section of the right name. Keys of other environments are excluded.
    """
    path_names = path.split(".")
    # The section of an environment has itself as ``declaring_class``: the schema lacks a field.
    other_env_prefixes = tuple(
        f"{name}."
        for name, key in keys.items()
        if key.section is key.declaring_class and key.name not in path_names
    )
    candidate_keys = [key for key in keys if not key.startswith(other_env_prefixes)]
    name_counts = Counter(map(_get_last_name, candidate_keys))
    return [
        key
        for key in candidate_keys
        if len(path_names) == 1
        or key.split(".")[0] == path_names[0]
        or name_counts[_get_last_name(key)] == 1
        or key.split(".")[-2:] == path_names[-2:]
    ]


def _list_similar_keys(path: str, keys: Mapping[str, Key]) -> list[str]:
    """Return the keys that ``path`` may mean: all keys of this name if it has no section."""
    nearest_key = find_nearest_key(path, keys)
    keys_of_name = [key for key in _select_candidates(path, keys) if _get_last_name(key) == path]
    return keys_of_name or ([nearest_key] if nearest_key else [])


def _get_last_name(path: str) -> str:
    return path.rpartition(".")[2]


def find_replacement_of_foreign_key(path: str) -> str | None:
    """Return the setting of this framework that replaces ``path`` of another framework.

    ``path`` is a key or ``key=value``. None if no replacement is known.
    """
    for pattern, equivalent_setting in EQUIVALENT_SETTINGS.items():
        if fnmatch.fnmatchcase(path, pattern):
            return equivalent_setting
    return None


def build_unknown_key_problem(path: str, value: object, keys: Mapping[str, Key]) -> Problem:
    """Return the message for a key that does not exist."""
    section = path.rpartition(".")[0]
    while section and not list_child_names(section, keys):
        section = section.rpartition(".")[0]
    equivalent_text = find_replacement_of_foreign_key(path)
    similar_keys = [] if equivalent_text else _list_similar_keys(path, keys)
    hint = f"; did you mean {' or '.join(similar_keys)}?" if similar_keys else ""
    settings_text = " or ".join(f"{key}={value}" for key in similar_keys)
    fix = equivalent_text or settings_text or "leave it out"
    section_text = section or "the top level"
    names = ", ".join(list_child_names(section, keys))
    text = f"{path}={value!r}: unknown key{hint}; allowed in {section_text}: {names}; fix: {fix}"
    return Problem(text, "unknown_key")
