"""Rows of files as tasks.

The columns are the usual ones of single-turn data::

    prompt        [{"role": "user", "content": str}, ...], or the user's text
    data_source   str, optional: where the row is from; without it the file's name
    reward_model  {"ground_truth": what the grader compares with}, or a column ground_truth
    extra_info    {...}, optional: handed to the grader
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_system.environments.base import Task
from agent_system.environments.env_package.dataset.settings import DatasetSettings
from agent_system.reward_manager.custom import load_function
from agent_system.tokens.template import Message
from verl.utils.tables import read_rows

NAME = "dataset"
ROLES = ("system", "user", "assistant")


class BadRow(ValueError):
    """A row that cannot be a task; the message names file, row, column and what is allowed."""


def tasks(settings: DatasetSettings, split: str) -> list[Task]:
    """The rows of the split's files, in order.

    Raises ``FileNotFoundError`` for a file that is not there, ``BadRow`` for a row that is no task,
    ``ValueError`` where no file is named.
    """
    files = settings.val_files if split == "val" else settings.train_files
    if not files:
        raise ValueError(
            f"data.{split}_files=[]: no file of {split} prompts; allowed: Parquet or JSON-lines "
            f"files; fix: data.{split}_files=[FILE] (or env.{NAME}.{split}_files)"
        )
    return [
        _task(row, f"{split}/{number}", where, settings)
        for number, (row, where) in enumerate(_rows(settings, files))
    ]


def _rows(
    settings: DatasetSettings, files: Sequence[str]
) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Every row, with the words that say where it is."""
    own = settings.custom_cls
    if own.path is not None:
        rows = load_function(own.path, own.name or "", "env.dataset.custom_cls")(list(files))
        for number in range(len(rows)):
            yield rows[number], f"{own.name}, row {number}"
        return
    for name in files:
        path = Path(name).expanduser()
        for number, row in enumerate(read_rows(path)):
            yield row, f"{path}, row {number}"


def _task(row: Mapping[str, Any], place: str, where: str, settings: DatasetSettings) -> Task:
    source = row.get(settings.reward_fn_key) or Path(where.split(",", 1)[0]).stem
    return {
        "task_id": f"{NAME}/{place}",
        "data_source": str(source),
        "messages": _messages(row, settings.prompt_key, where),
        "ground_truth": _ground_truth(row),
        "extra_info": row.get("extra_info") or {},
    }


def _messages(row: Mapping[str, Any], key: str, where: str) -> list[Message]:
    prompt = row.get(key)
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise BadRow(
            f"{where}: column {key!r} holds {str(prompt)[:80]!r}; allowed: messages or a text; "
            f"fix: data.prompt_key=COLUMN, one of {', '.join(map(str, row))}"
        )
    for message in prompt:
        known = isinstance(message, Mapping) and message.get("role") in ROLES
        if not known or not isinstance(message.get("content"), str):
            raise BadRow(
                f"{where}: column {key!r} has the message {str(message)[:80]!r}; allowed: a role "
                f"({', '.join(ROLES)}) and a content that is text"
            )
    if prompt[-1]["role"] != "user":
        raise BadRow(
            f"{where}: the last message of column {key!r} is the {prompt[-1]['role']}'s; allowed: "
            "the user's, which the policy answers"
        )
    return [{"role": message["role"], "content": message["content"]} for message in prompt]


def _ground_truth(row: Mapping[str, Any]) -> Any:
    reward_model = row.get("reward_model")
    if isinstance(reward_model, Mapping) and "ground_truth" in reward_model:
        return reward_model["ground_truth"]
    return row.get("ground_truth")
