"""Ground truths of a row as texts that an answer is compared with."""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from agent_system.environments.env_package.dataset.answer_text import normalize_answer

# Keys of a ground truth that is a dictionary of accepted answers. A dictionary with other keys
# needs a user-provided grader.
ALIASES = (
    *("answer", "answers", "target", "targets", "value", "text", "aliases"),
    *("normalized_value", "normalized_aliases"),
)
_FIX = "fix: custom_reward_function.path=FILE (env.dataset.reward.path), or a column ground_truth"


def read_truths(ground_truth: Any) -> list[str]:
    """Return the accepted answers as texts. An answer is right if it equals one of them.

    A list contains alternative answers, and so does a dictionary with keys in ``ALIASES``. Raises
    ``ValueError`` if there is no ground truth, or one that cannot be compared with a text.

    >>> read_truths({"value": "Paris", "aliases": ["City of Light"]})
    ['Paris', 'City of Light']
    """
    truths = list(_accepted_texts(ground_truth))
    if not truths or not all(map(normalize_answer, truths)):
        raise ValueError(
            f"ground_truth={_quote_value(ground_truth)} is no ground truth; allowed: a text, a "
            f"number, or a list of them; {_FIX}"
        )
    return list(dict.fromkeys(truths))


def _accepted_texts(truth: Any) -> Iterator[str]:
    if isinstance(truth, Mapping):
        unknown = [key for key in truth if key not in ALIASES]
        if unknown or not truth:
            raise ValueError(
                f"ground_truth={_quote_value(truth)}: an answer cannot be compared with a "
                f"dictionary with {unknown[:1] or 'no keys'}; allowed: the keys "
                f"{', '.join(sorted(ALIASES))}; {_FIX}"
            )
        for value in truth.values():
            yield from _accepted_texts(value)
    elif isinstance(truth, (list, tuple)):
        for alias in truth:
            if isinstance(alias, (list, tuple, Mapping)):
                raise ValueError(
                    f"ground_truth={_quote_value(truth)} contains {_quote_value(alias)}; allowed: "
                    f"a list of texts and numbers; {_FIX}"
                )
            yield from _accepted_texts(alias)
    elif isinstance(truth, bool):
        # For the JSON value true, accept the words "true" and "yes".
        yield from (("true", "yes") if truth else ("false", "no"))
    elif isinstance(truth, float) and not math.isfinite(truth):
        yield ""
    elif isinstance(truth, str) and _is_json_object(truth):
        yield from _accepted_texts(json.loads(truth))
    else:
        yield "" if truth is None else str(truth)


def _is_json_object(text: str) -> bool:
    if not text.lstrip().startswith("{"):
        return False
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _quote_value(value: Any) -> str:
    return f"{str(value)[:80]!r}"
