"""Reader of messages and other cells from rows of data files, for datasets, SFT and generation.

    file ──read_table──▶ DataRow ──▶ read_prompt_messages    messages that the policy answers
                                 ──▶ read_episode_messages   messages that the policy is trained on
                                 ──▶ read_cell               any other cell, as JSON types

A row with content that would be ignored is refused with the error ``InvalidRowError``. Its message
names the configuration key, file, row, column and value, what is allowed, and the fix.
"""

import contextlib
import math
import os
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
from verl.config.settings.errors import ProblemCode, get_problem_code
from verl.utils.chat_template import THOUGHT_KEYS
from verl.utils.tables import parse_json, read_rows

# {"role": "system" | "user" | "assistant", "content": text}; optional in an episode: "weight"
Message = dict[str, Any]
ROLES = ("system", "user", "assistant")
MAX_DEPTH = 64  # maximum nesting of lists and objects in a cell
MAX_CHARACTERS = 1_000_000  # maximum number of characters in the messages of a row
MAX_INTEGER_BITS = 10_000  # size limit of an integer in a cell; Python prints at most 4,300 digits
MAX_DECIMAL_POWER = 1000  # maximum power of ten of a decimal; larger ones take minutes to convert
SHOWN_CHARACTERS = 80  # maximum number of characters of a value in an error message
SURROGATES = re.compile("[\ud800-\udfff]")
# Start of a list of messages. It also matches invalid JSON, for example with Python's quotes.
_MESSAGES_START = re.compile(r"""\s*\[\s*\{\s*['"](role|content)['"]\s*:""")

# Field names of published data sets, by content.
MEDIA_FIELDS = ("images", "image", "videos", "video", "audios", "audio", "multi_modal_data")
TOOL_FIELDS = ("tools", "functions")
CALL_FIELDS = ("tool_calls", "function_call", "tool_call_id", "tool_responses")
WEIGHT_FIELDS = ("weight", "loss_mask", "loss_weight", "train", "training", "trainable", "loss")
ONLY_TEXT_REASON = "the policy is shown only text"
_NO_TOOLS_REASON = "tools come from the environment (env.env_name=tools), not from rows"
_TOKEN_MASK_REASON = "the messages are tokenized here, and the mask belongs to other tokens"
# Columns and message fields that are refused -> reason why they are not read.
UNREAD_COLUMNS = {
    **dict.fromkeys(MEDIA_FIELDS, ONLY_TEXT_REASON),
    **dict.fromkeys(TOOL_FIELDS, _NO_TOOLS_REASON),
    "documents": "documents belong into the content of a message",
    "chat_template_kwargs": "data.apply_chat_template_kwargs sets them for all rows",
}
# Columns with a system text. They are refused if the messages have none.
SYSTEM_COLUMNS: Mapping[str, str] = dict.fromkeys(
    ("system", "system_prompt"), "the system text belongs into the messages"
)
UNREAD_EPISODE_COLUMNS = UNREAD_COLUMNS | dict.fromkeys(
    ("loss_mask", "labels", "completion_mask", "assistant_masks"), _TOKEN_MASK_REASON
)
UNREAD_FIELDS = {
    **dict.fromkeys(MEDIA_FIELDS, ONLY_TEXT_REASON),
    **dict.fromkeys((*CALL_FIELDS, *TOOL_FIELDS), _NO_TOOLS_REASON),
    **dict.fromkeys(
        THOUGHT_KEYS, "thoughts are read from the content, where the policy writes them"
    ),
    **dict.fromkeys(
        ("train_detail", "training_detail"), "a message is trained on as a whole, or not at all"
    ),
    "refusal": "a refusal is read from the content",
    "prefix": "the policy answers with new messages and does not continue one",
    "name": "the policy is not shown names",
}


class InvalidRowError(ConfigError):
    """Error: a file or row cannot be used. The message names the key, the file and the fix."""

    column = ""  # column of the wrong value; "" if the error is about the file


class _NotJsonValueError(ValueError):
    """Error: JSON cannot represent a value. The message describes the value."""


@dataclass(frozen=True, slots=True)
class DataRow:
    """Row of a data file: its cells by column name, and its location for error messages."""

    source: str  # for example "data.train_files='train.parquet'"
    row_index: int  # from 0
    cells: Mapping[str, Any]

    @property
    def row_location(self) -> str:
        """Return source and index of the row, with which error messages begin."""
        return f"{self.source}: row {self.row_index}"

    def make_error(
        self, column: str, reason: str, allowed: str, fix: str, code: ProblemCode = "wrong_cell"
    ) -> InvalidRowError:
        """Return an ``InvalidRowError`` for the value in ``column``.

        ``reason`` continues the sentence "column ...", for example "has no text". ``allowed`` and
        ``fix`` say what is allowed and what the user can do.
        """
        error = InvalidRowError(
            f"{self.row_location}: column {column!r} {reason}; allowed: {allowed}; fix: {fix}", code
        )
        error.column = column
        return error

    def read_cell(self, column: str) -> Any:
        """Return the cell in ``column``, converted to JSON types.

        Arrays and tuples become lists, NaN and missing values None, and decimals numbers. Dates and
        times become ISO texts, time differences seconds, and bytes UTF-8 text. Raises
        ``InvalidRowError`` for anything else, for a lone surrogate, and for values nested deeper
        than ``MAX_DEPTH``.
        """
        return self._convert_cell(column, self.cells.get(column))

    def read_object(self, column: str) -> dict[str, Any] | None:
        """Return the JSON object in ``column`` as a dict; None if the cell is empty.

        The cell may be an object or the JSON text of an object. Raises ``InvalidRowError`` for
        other values.
        """
        value = self.read_cell(column)
        if isinstance(value, str) and value.lstrip().startswith("{"):
            with contextlib.suppress(ValueError):
                value = self._convert_cell(column, parse_json(value))
        if value is None or isinstance(value, dict):
            return value
        why, fix = f"holds {_shorten_repr(value)}", "write an object, or remove the value"
        raise self.make_error(column, why, "an object ({...}) or null", fix)

    def parse_messages(self, column: str, text: str) -> Any:
        """Return the list of messages if ``text`` is JSON of messages, else ``text`` itself.

        Raises ``InvalidRowError`` if ``text`` looks like messages but is not valid JSON.
        """
        if not text.lstrip().startswith("["):
            return text
        try:
            parsed_value = parse_json(text)
        except ValueError as error:
            if _MESSAGES_START.match(text):
                why = f"holds {_shorten_repr(text)}, which is not JSON ({error})"
                allowed = "messages, or JSON of them"
                raise self.make_error(column, why, allowed, "write JSON") from error
            return text
        is_message = [isinstance(item, dict) and "role" in item for item in parsed_value]
        is_list_of_messages = bool(is_message) and all(is_message)
        return self._convert_cell(column, parsed_value) if is_list_of_messages else text

    def _convert_cell(self, column: str, value: object) -> Any:
        try:
            return _to_json_types(value, 0)
        except _NotJsonValueError as error:
            allowed, fix = "values that JSON can represent", "convert the value, or remove it"
            raise self.make_error(column, str(error), allowed, fix) from None

    def refuse_unread_columns(self, columns: Mapping[str, str]) -> None:
        """Raise ``InvalidRowError`` if the row has a value in one of ``columns``.

        These columns are never read. ``columns`` maps their names to the reasons.
        """
        for column, why in columns.items():
            value = self.cells.get(column)
            if not _is_empty(value):
                why = f"holds {_shorten_repr(value)}, which would be ignored: {why}"
                fix = "remove these rows, or the column if the text is complete without it"
                raise self.make_error(column, why, "rows without it", fix, "no_effect")


# ---- files -----------------------------------------------------------------------------------


def read_table(key: str, files: Sequence[str]) -> Iterator[DataRow]:
    """Yield the rows of all ``files``. Error messages name the configuration key ``key``.

    Raises ``InvalidRowError`` for a file that does not exist, cannot be read, or has no rows.
    """
    for name in files:
        source = f"{key}={str(name)!r}"
        path = Path(os.path.expanduser(name))  # unchanged for ~USER of an unknown user
        num_rows = 0
        try:
            for cells in read_rows(path):
                yield DataRow(source, num_rows, cells)
                num_rows += 1
        except (OSError, ValueError) as error:
            why = str(error).removeprefix(str(path)).lstrip(",: ")
            code = get_problem_code(error, "unreadable_file")
            raise InvalidRowError(f"{source}: {why}", code) from error
        if num_rows == 0:
            raise InvalidRowError(
                f"{source}: has no row; allowed: a file with at least one row; "
                "fix: name another file",
                "no_rows",
            )


# ---- messages --------------------------------------------------------------------------------


def read_prompt_messages(row: DataRow, column: str, column_key: str) -> list[Message]:
    """Return the messages in ``column`` as the prompt of an episode.

    The cell is a list of messages, the JSON text of such a list, or the text of one user message.
    ``column_key`` is the config key that sets ``column``. Raises ``InvalidRowError`` if the last
    message is not a user message with text.
    """
    row.refuse_unread_columns(UNREAD_COLUMNS)
    messages = _read_messages(row, column, column_key)
    last_message = messages[-1]
    if last_message["role"] != "user":
        why = f"ends with a message of the role {last_message['role']}"
        allowed = "a last message of the user, which the policy answers"
        raise row.make_error(column, why, allowed, "remove the messages after it")
    if not last_message["content"].strip():
        why = "ends with a message without text"
        raise row.make_error(column, why, "a text to answer", "remove the row")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def read_episode_messages(row: DataRow, column: str, column_key: str) -> list[Message]:
    """Return the messages in ``column`` as an episode for supervised training.

    The messages are a prompt, followed by assistant and user messages alternately. A message with a
    loss weight in the file has the key ``weight``, 0.0 or 1.0. ``column_key`` is the config key
    that sets ``column``. Raises ``InvalidRowError`` for other roles or weights, and if no assistant
    message is trained on.
    """
    row.refuse_unread_columns(UNREAD_EPISODE_COLUMNS)
    messages = _read_messages(row, column, column_key)
    roles = [message["role"] for message in messages]
    prompt_length = roles.index("assistant") if "assistant" in roles else 0
    if not prompt_length:
        allowed = "a prompt, followed by messages of the assistant"
        raise row.make_error(column, f"has the roles {roles}", allowed, "complete the row")
    if roles[prompt_length:] != [
        "assistant" if i % 2 == 0 else "user" for i in range(len(roles) - prompt_length)
    ]:
        allowed = "assistant and user alternately after the prompt"
        fix = "join adjacent messages of one role"
        raise row.make_error(column, f"has the roles {roles}", allowed, fix)
    if not any(message["content"].strip() for message in messages[:prompt_length]):
        raise row.make_error(column, "has a prompt without text", "a text", "remove the row")
    for message in messages[prompt_length:]:
        is_trained_on = message["role"] == "assistant" and message.get("weight") != 0
        if is_trained_on and not message["content"].strip():
            why = "has a message of the assistant without text"
            fix = "remove the row, or give the message weight 0"
            raise row.make_error(column, why, "a text to train on", fix)
    if not any(m.get("weight") != 0 for m in messages[prompt_length:] if m["role"] == "assistant"):
        why = "has weight 0 for every message of the assistant"
        raise row.make_error(column, why, "at least one with weight 1", "remove the row")
    if len({message.get("weight") for message in messages[:prompt_length]}) > 1:
        why = "has different weights in the messages of its prompt"
        allowed = "one weight for all messages before the assistant's first"
        raise row.make_error(column, why, allowed, "give all of them weight 0")
    return messages


def _read_messages(row: DataRow, column: str, column_key: str) -> list[Message]:
    """Return the messages in ``column`` with ``role``, ``content`` and, if given, ``weight``."""
    cell = row.read_cell(column)
    if isinstance(cell, str):
        cell = row.parse_messages(column, cell)
    if isinstance(cell, str):
        cell = [{"role": "user", "content": cell}]
    if not isinstance(cell, list) or not cell:
        why, fix = _explain_unusable_cell(row, column, cell, column_key)
        code = "wrong_cell" if column in row.cells else "missing_column"
        raise row.make_error(column, why, "messages or a text", fix, code)
    messages = [_read_message(row, column, raw_message) for raw_message in cell]
    num_characters = sum(len(message["content"]) for message in messages)
    if num_characters > MAX_CHARACTERS:
        why = f"holds {num_characters:,} characters"
        allowed = f"at most {MAX_CHARACTERS:,} in a row"
        raise row.make_error(column, why, allowed, "remove the row, or shorten it")
    if messages[0]["role"] != "system":
        row.refuse_unread_columns(SYSTEM_COLUMNS)
    return messages


def _explain_unusable_cell(
    row: DataRow, column: str, cell: object, column_key: str
) -> tuple[str, str]:
    """Return why ``cell`` has no messages, and the fix."""
    fix = f"set {column_key}=COLUMN to one of {', '.join(map(str, row.cells))}"
    if column not in row.cells:
        return "is not in the row", fix
    if cell is None or cell == []:
        why = "is null" if cell is None else "holds an empty list"
        return why, "remove the row, or write its messages"
    if isinstance(cell, Mapping):
        fix = "write a list of messages ([{...}])"
    return f"holds {str(cell)[:SHOWN_CHARACTERS]!r}", fix


def _read_message(row: DataRow, column: str, value: Any) -> Message:
    role = value.get("role") if isinstance(value, Mapping) else None
    content = _read_text(value.get("content")) if isinstance(value, Mapping) else None
    for field, why in UNREAD_FIELDS.items() if isinstance(value, Mapping) else ():
        if not _is_empty(value.get(field)):
            why = f"has a message with {field!r}, which would be ignored: {why}"
            fix = "remove the row, or the field"
            raise row.make_error(column, why, "a role and a content", fix, "no_effect")
    if role not in ROLES or content is None:
        why = f"has the message {str(value)[:SHOWN_CHARACTERS]!r}"
        allowed = f"a role ({', '.join(ROLES)}) and a content that is text"
        raise row.make_error(column, why, allowed, "rename roles and fields, or remove the row")
    weight = _read_weight(row, column, value)
    message: Message = {"role": role, "content": content}
    return message if weight is None else {**message, "weight": weight}


def _read_text(content: object) -> str | None:
    """Return a text, or the joined texts of typed parts; None for other contents."""
    if isinstance(content, str):
        return content
    content_parts = content if isinstance(content, list) else []
    part_texts = [
        part["text"]
        for part in content_parts
        if isinstance(part, Mapping)
        and isinstance(part.get("text"), str)
        # In Parquet all parts have the same fields. Fields of image parts are null in text parts.
        and part.get("type") == "text"
        and all(_is_empty(part[field]) for field in part if field not in ("type", "text"))
    ]
    return "".join(part_texts) if part_texts and len(part_texts) == len(content_parts) else None


def _read_weight(row: DataRow, column: str, message: Mapping[str, Any]) -> float | None:
    """Return the loss weight of a message, or None if it has no field of ``WEIGHT_FIELDS``.

    Raises ``InvalidRowError`` for a value other than 0 and 1, and for fields with different values.
    """
    weight_by_field = {
        field: message[field] for field in WEIGHT_FIELDS if message.get(field) is not None
    }
    for field, value in weight_by_field.items():
        if isinstance(value, (list, str, Mapping)) or value not in (0, 1):
            why = f"has a message with {field}={_shorten_repr(value)}"
            raise row.make_error(column, why, "0 and 1", "remove the field")
    if len(set(map(float, weight_by_field.values()))) > 1:
        why = f"has a message with {weight_by_field}"
        raise row.make_error(column, why, "equal weights", "keep one of them")
    return float(next(iter(weight_by_field.values()))) if weight_by_field else None


# ---- values ----------------------------------------------------------------------------------


def _to_json_types(value: object, depth: int) -> Any:
    """Convert ``value``, at nesting ``depth``, to JSON types, or raise ``_NotJsonValueError``."""
    if depth > MAX_DEPTH:
        raise _NotJsonValueError(f"is nested deeper than {MAX_DEPTH} levels")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if value.bit_length() > MAX_INTEGER_BITS:
            raise _NotJsonValueError(f"holds an integer of {value.bit_length():,} bits")
        return value
    if isinstance(value, str):
        if SURROGATES.search(value):
            raise _NotJsonValueError(f"holds a lone surrogate: {_shorten_repr(value)}")
        return str.__str__(value)  # without the class of numpy or of an enumeration
    if isinstance(value, float):
        if math.isinf(value):
            raise _NotJsonValueError(f"holds {value}")
        return None if math.isnan(value) else value
    if isinstance(value, Mapping):
        return {
            _to_json_types(str(key), depth): _to_json_types(item, depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_to_json_types(item, depth + 1) for item in value]
    return _scalar_to_json_types(value, depth)


def _scalar_to_json_types(value: object, depth: int) -> Any:
    """Convert bytes, dates, decimals and arrays to JSON types; see ``DataRow.read_cell``."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        try:
            return _to_json_types(bytes(value).decode("utf-8"), depth)
        except UnicodeDecodeError as error:
            raise _NotJsonValueError(
                f"holds bytes that are not UTF-8 text: {_shorten_repr(value)}"
            ) from error
    if isinstance(value, Decimal):
        if value.is_nan():
            return None
        if abs(value.adjusted()) > MAX_DECIMAL_POWER:
            raise _NotJsonValueError(f"holds {value}")
        is_whole = value.is_finite() and value == value.to_integral_value()
        return int(value) if is_whole else _to_json_types(float(value), depth)
    if str(value) in ("NaT", "<NA>"):  # missing values of numpy and pandas
        return None
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    if isinstance(value, (UUID, np.datetime64, np.timedelta64)):
        return str(value)
    to_list = getattr(value, "tolist", None)  # arrays, tensors and their scalars
    if to_list is None:
        raise _NotJsonValueError(f"holds a {type(value).__name__}: {_shorten_repr(value)}")
    try:
        items = to_list()
    except Exception as error:  # for example a sparse tensor
        raise _NotJsonValueError(
            f"holds a {type(value).__name__} without values: {error}"
        ) from error
    return _to_json_types(items, depth + 1)


def _is_empty(value: Any, depth: int = 0) -> bool:
    """Return True if the cell or field ``value`` has no content, so it may be left unread.

    False, None, NaN, an empty text and a container of empty values count as empty. False inside of
    a container does not.
    """
    if depth > MAX_DEPTH:
        return False
    if isinstance(value, Mapping):
        return all(_is_empty(item, depth + 1) for item in value.values())
    with contextlib.suppress(Exception):  # a sparse tensor has no list
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return all(_is_empty(item, depth + 1) for item in value)
    if isinstance(value, float) and math.isnan(value):
        return True
    is_top_level_false = value is False and depth == 0  # inside a container, False is a value
    return value is None or is_top_level_false or (isinstance(value, (str, bytes)) and not value)


def _shorten_repr(value: object) -> str:
    """Return the first ``SHOWN_CHARACTERS`` of ``repr(value)``."""
    try:
        return repr(value)[:SHOWN_CHARACTERS]
    except Exception:  # an integer of more than 4,300 digits, or a user-provided class
        return f"a {type(value).__name__}"
