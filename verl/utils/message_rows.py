"""Messages, truths and other cells of rows from files: the one reader that datasets, supervised
training and generation share.

    file ──read_table──▶ DataRow ──▶ prompt_messages    what a policy answers
                             ──▶ episode_messages   what a policy learns to say
                             ──▶ read               any other cell, as JSON has it

What a row says is used or refused, never passed over. A refusal is a ``BadRow``, which names the
configuration key, the file, the row and the column, what is there, what is allowed, and the fix.
"""

import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np

from verl.config.settings import ConfigError
from verl.utils.tables import parse_json, read_rows

# {"role": "system" | "user" | "assistant", "content": text}; of an episode perhaps "weight" as well
Message = dict[str, Any]
ROLES = ("system", "user", "assistant")
MAX_DEPTH = 64  # levels of lists and objects in a cell
MAX_CHARACTERS = 1_000_000  # of the messages of a row
SHOWN = 80  # characters of a value in a message of refusal
SURROGATES = re.compile("[\ud800-\udfff]")
# Lists of messages as Python prints them, and as JSON that was damaged.
_LIKE_MESSAGES = re.compile(r"""\s*\[\s*\{\s*['"](role|content)['"]\s*:""")

MEDIA = ("images", "image", "videos", "video", "audios", "audio", "multi_modal_data")
TOOL_CALLS = ("tool_calls", "function_call", "tool_call_id", "tool_responses")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
WEIGHTS = ("weight", "loss_mask", "loss_weight", "train", "trainable", "loss")
ONLY_TEXT = "text alone is shown to a policy"
_NO_TOOLS = "tools come from the environment (env.env_name=tools), not from rows"
_TOKEN_MASK = "tokens are made of the messages, and the mask is of other tokens"
# Columns and fields of messages that say something nobody reads, and why.
UNREAD_COLUMNS = {**dict.fromkeys(MEDIA, ONLY_TEXT), "tools": _NO_TOOLS}
UNREAD_EPISODE_COLUMNS = UNREAD_COLUMNS | dict.fromkeys(
    ("loss_mask", "labels", "completion_mask", "assistant_masks"), _TOKEN_MASK
)
UNREAD_FIELDS = {
    **dict.fromkeys(MEDIA, ONLY_TEXT),
    **dict.fromkeys(TOOL_CALLS, _NO_TOOLS),
    **dict.fromkeys(THOUGHTS, "thoughts are read in the content, as the policy writes them"),
    "name": "no name is shown to a policy",
}


class BadRow(ConfigError):
    """A file or row that cannot be read as what it is for."""


class _NotPlain(ValueError):
    """A value that JSON cannot carry, and what is allowed."""


@dataclass(frozen=True, slots=True)
class DataRow:
    """A row, the configuration key with the value that names its source, and its number there."""

    source: str  # "data.train_files='train.parquet'"
    number: int
    cells: Mapping[str, Any]

    @property
    def place(self) -> str:
        """Where the row is, as a message begins."""
        return f"{self.source}: row {self.number}"

    def bad(self, column: str, why: str, allowed: str, fix: str) -> BadRow:
        """The refusal of the row for what stands in ``column``."""
        return BadRow(f"{self.place}: column {column!r} {why}; allowed: {allowed}; fix: {fix}")

    def read(self, column: str) -> Any:
        """The cell as JSON has it: arrays and tuples are lists, NaN and missing values None, times
        are texts in ISO format, decimals numbers, bytes the text that they spell in UTF-8.

        Raises ``BadRow`` for anything else, for half a surrogate pair, and for values nested deeper
        than ``MAX_DEPTH``.
        """
        return self._as_json(column, self.cells.get(column))

    def read_object(self, column: str) -> dict[str, Any] | None:
        """The cell where it is an object, or the JSON text of one; None where there is none.

        Raises ``BadRow`` for anything else.
        """
        value = self.read(column)
        if isinstance(value, str) and value.lstrip().startswith("{"):
            with contextlib.suppress(ValueError):
                value = self._as_json(column, parse_json(value))
        if value is None or isinstance(value, dict):
            return value
        why = f"holds {_short(value)}"
        raise self.bad(column, why, "an object ({...}) or null", "write an object, or drop it")

    def parsed(self, column: str, text: str) -> Any:
        """The messages that ``text``, held by ``column``, spells in JSON; else the text itself.

        Raises ``BadRow`` for messages in another notation.
        """
        if not text.lstrip().startswith("["):
            return text
        try:
            found = parse_json(text)
        except ValueError as error:
            if _LIKE_MESSAGES.match(text):
                why = f"holds {_short(text)}, which is no JSON ({error})"
                raise self.bad(column, why, "messages, or JSON of them", "write JSON") from error
            return text
        said = [one for one in found if isinstance(one, dict) and "role" in one]
        return self._as_json(column, found) if said and len(said) == len(found) else text

    def _as_json(self, column: str, value: Any) -> Any:
        try:
            return _plain(value, 0)
        except _NotPlain as error:
            raise self.bad(column, str(error), "what JSON can hold", "convert or drop it") from None

    def refuse_unread(self, columns: Mapping[str, str]) -> None:
        """Raise ``BadRow`` where one of ``columns``, given with the reason, is not empty."""
        for column, why in columns.items():
            if column in self.cells and not _is_empty(self.cells[column]):
                raise self.bad(
                    column,
                    f"holds {_short(self.cells[column])}, and would be ignored: {why}",
                    "rows without it",
                    "leave out these rows; or drop the column, if the text says all",
                )


# ---- files -----------------------------------------------------------------------------------


def read_table(key: str, files: Sequence[str]) -> Iterator[DataRow]:
    """The rows of ``files``, the value of the configuration key ``key``.

    Raises ``BadRow`` for a file that is not there, cannot be read, or holds no row.
    """
    for name in files:
        source = f"{key}={str(name)!r}"
        path = Path(name).expanduser()
        number = -1
        try:
            for number, cells in enumerate(read_rows(path)):
                yield DataRow(source, number, cells)
        except (OSError, ValueError) as error:
            why = str(error).removeprefix(str(path)).lstrip(",: ")
            raise BadRow(f"{source}: {why}") from error
        if number < 0:
            raise BadRow(f"{source}: holds no row; allowed: a row or more; fix: name another file")


# ---- messages --------------------------------------------------------------------------------


def prompt_messages(row: DataRow, column: str, column_key: str) -> list[Message]:
    """The messages of ``column``, a list of them, its JSON text, or the text of the user's one;
    ``column_key`` is the configuration key that names the column.

    Raises ``BadRow`` unless the last one is the user's and says something.
    """
    row.refuse_unread(UNREAD_COLUMNS)
    messages = _messages(row, column, column_key)
    last = messages[-1]
    if last["role"] != "user":
        why = f"ends with a message that is the {last['role']}'s"
        raise row.bad(column, why, "the user's, which the policy answers", "cut the rest off")
    if not last["content"].strip():
        why = "ends with a message without text"
        raise row.bad(column, why, "a text to answer", "leave out the row")
    return [{"role": one["role"], "content": one["content"]} for one in messages]


def episode_messages(row: DataRow, column: str, column_key: str) -> list[Message]:
    """The messages of ``column``: a prompt, then the assistant's and the user's by turns.

    ``weight`` of a message is the loss weight that the row gives it, 0.0 or 1.0; where it gives
    none there is none. Raises ``BadRow`` for anything else.
    """
    row.refuse_unread(UNREAD_EPISODE_COLUMNS)
    messages = _messages(row, column, column_key)
    roles = [message["role"] for message in messages]
    start = roles.index("assistant") if "assistant" in roles else 0
    if not start:
        allowed = "a prompt, and messages of the assistant after it"
        raise row.bad(column, f"has the roles {roles}", allowed, "complete the row")
    if roles[start:] != ["assistant" if i % 2 == 0 else "user" for i in range(len(roles) - start)]:
        allowed = "assistant and user by turns after the prompt"
        raise row.bad(column, f"has the roles {roles}", allowed, "join neighbours of one role")
    if not any(message["content"].strip() for message in messages[:start]):
        raise row.bad(column, "has a prompt without text", "a text", "leave out the row")
    for message in messages[start:]:
        learnt = message["role"] == "assistant" and message.get("weight") != 0
        if learnt and not message["content"].strip():
            why = "has a message of the assistant without text"
            raise row.bad(column, why, "a text to learn", "leave out the row, or weigh it 0")
    if not any(m.get("weight") != 0 for m in messages[start:] if m["role"] == "assistant"):
        why = "weighs every message of the assistant 0"
        raise row.bad(column, why, "one that is learnt", "leave out the row")
    if len({message.get("weight") for message in messages[:start]}) > 1:
        allowed = "one weight for all messages in front of the assistant's first"
        raise row.bad(column, "weighs the messages of its prompt unlike", allowed, "weigh all 0")
    return messages


def _messages(row: DataRow, column: str, column_key: str) -> list[Message]:
    """The messages of ``column``, none of which says more than role, content and weight."""
    held = row.read(column)
    if isinstance(held, str):
        held = row.parsed(column, held)
    if isinstance(held, str):
        held = [{"role": "user", "content": held}]
    if not isinstance(held, list) or not held:
        columns = ", ".join(map(str, row.cells))
        fix = f"{column_key}=COLUMN, one of {columns}"
        raise row.bad(column, f"holds {str(held)[:SHOWN]!r}", "messages or a text", fix)
    messages = [_message(row, column, one) for one in held]
    size = sum(len(message["content"]) for message in messages)
    if size > MAX_CHARACTERS:
        why = f"holds {size:,} characters"
        raise row.bad(column, why, f"{MAX_CHARACTERS:,} in a row", "leave out the row, or cut it")
    return messages


def _message(row: DataRow, column: str, held: Any) -> Message:
    role = held.get("role") if isinstance(held, Mapping) else None
    content = _text(held.get("content")) if isinstance(held, Mapping) else None
    for field, why in UNREAD_FIELDS.items() if isinstance(held, Mapping) else ():
        if not _is_empty(held.get(field)):
            why = f"has a message with {field!r}, which would be ignored: {why}"
            raise row.bad(column, why, "a role and a content", "leave out the row, or the field")
    if role not in ROLES or content is None:
        roles = ", ".join(ROLES)
        raise row.bad(
            column,
            f"has the message {str(held)[:SHOWN]!r}",
            f"a role ({roles}) and a content that is text",
            "rename roles and fields, or leave out the row",
        )
    weight = _weight(row, column, held)
    message: Message = {"role": role, "content": content}
    return message if weight is None else {**message, "weight": weight}


def _text(content: Any) -> str | None:
    """A text, or one in typed parts; None for anything else."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [
        part["text"]
        for part in parts
        if isinstance(part, Mapping)
        and isinstance(part.get("text"), str)
        # Structs of a column share their fields: those of other kinds of parts are null.
        and part.get("type") == "text"
        and all(_is_empty(part[field]) for field in part if field not in ("type", "text"))
    ]
    return "".join(texts) if texts and len(texts) == len(parts) else None


def _weight(row: DataRow, column: str, held: Mapping[str, Any]) -> float | None:
    """The loss weight that a message carries, under whichever name."""
    given = {field: held[field] for field in WEIGHTS if held.get(field) is not None}
    for field, value in given.items():
        if isinstance(value, (list, str, Mapping)) or value not in (0, 1):
            why = f"has a message with {field}={_short(value)}"
            raise row.bad(column, why, "0 and 1", "leave the field out")
    if len(set(map(float, given.values()))) > 1:
        raise row.bad(column, f"has a message with {given}", "weights that agree", "keep one")
    return float(next(iter(given.values()))) if given else None


# ---- values ----------------------------------------------------------------------------------


def _plain(value: Any, depth: int) -> Any:
    """``value`` as JSON has it. Raises ``_NotPlain``."""
    if depth > MAX_DEPTH:
        raise _NotPlain(f"is nested deeper than {MAX_DEPTH} levels")
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        if SURROGATES.search(value):
            raise _NotPlain(f"holds half a surrogate pair: {_short(value)}")
        return value
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, Mapping):
        return {_plain(str(key), depth): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, depth + 1) for item in value]
    return _plain_scalar(value, depth)


def _plain_scalar(value: Any, depth: int) -> Any:
    """``_plain`` of what JSON has no form for: texts, numbers and lists of other libraries."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        try:
            return _plain(bytes(value).decode("utf-8"), depth)
        except UnicodeDecodeError as error:
            raise _NotPlain(f"holds bytes that are no text: {_short(value)}") from error
    if str(value) in ("NaT", "<NA>", "NaN"):  # missing, as pandas, numpy and decimals say it
        return None
    if isinstance(value, Decimal):
        whole = value.is_finite() and value == value.to_integral_value()
        return int(value) if whole else float(value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    if isinstance(value, (UUID, np.datetime64, np.timedelta64)):
        return str(value)
    to_list = getattr(value, "tolist", None)  # arrays, tensors and their scalars
    if to_list is None:
        raise _NotPlain(f"holds a {type(value).__name__}: {_short(value)}")
    return _plain(to_list(), depth + 1)


def _is_empty(value: Any) -> bool:
    """``value`` says nothing: null, empty, or a struct of such fields."""
    if isinstance(value, Mapping):
        return all(map(_is_empty, value.values()))
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, (list, tuple)):
        return all(map(_is_empty, value))
    if isinstance(value, float) and math.isnan(value):
        return True
    return value is None or value is False or (isinstance(value, (str, bytes)) and not value)


def _short(value: Any) -> str:
    """The beginning of ``value``, as Python prints it."""
    return repr(value)[:SHOWN]
