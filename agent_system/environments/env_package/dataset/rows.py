"""Tasks made of the rows of files.

The columns are the usual ones of single-turn data::

    prompt        [{"role": "user", "content": str}, ...], JSON of that, or the user's text
    data_source   str, optional: origin of the row; by default the file's name
    reward_model  {"ground_truth": reference of the grader}, or a column ground_truth
    extra_info    {...}, optional: passed to the grader
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent_system.environments.env import Task
from agent_system.environments.env_package.dataset.grading import read_truths
from agent_system.environments.env_package.dataset.settings import DatasetSettings
from agent_system.reward_manager.custom import load_function
from verl.utils.message_rows import BadRow, DataRow, read_prompt_messages, read_table

NAME = "dataset"
SUPPORTED_STYLES = (None, "", "rule", "model")  # supported values of reward_model["style"]
CLASS_KEY = "data.custom_cls.name"


def list_tasks(settings: DatasetSettings, split: str, section: str = "data") -> list[Task]:
    """Return one task per row of the split's files, in order.

    ``section`` is the config section of the files, for error messages. Raises ``BadRow`` if no file
    is set, a file cannot be read, or a row is invalid.
    """
    files = settings.val_files if split == "val" else settings.train_files
    key = f"{section}.{split}_files"
    if not files:
        raise BadRow(
            f"{key}=[] names no file of {split} prompts; allowed: Parquet or JSON-lines "
            f"files; fix: set {key}=[FILE] (or env.{NAME}.{split}_files)"
        )
    rows = (
        read_table(key, files)
        if settings.custom_cls.path is None
        else _rows_of_class(settings, files)
    )
    return [_make_task(row, f"{split}/{index}", settings) for index, row in enumerate(rows)]


def _rows_of_class(settings: DatasetSettings, files: list[str]) -> Iterator[DataRow]:
    """Yield the rows of the user-provided class. Raises ``BadRow`` if it fails or has no row."""
    path, name = settings.custom_cls.path, settings.custom_cls.name or ""
    source = f"{CLASS_KEY}={name!r}"
    allowed = "allowed: a class called with the files, with a length and that many rows"
    try:
        rows = load_function(str(path), name, "env.dataset.custom_cls")(list(files))
        count = len(rows)
    except Exception as error:  # user-provided code
        raise BadRow(f"{source}: {error!r}; {allowed}; fix: correct the class") from error
    if not count:
        raise BadRow(f"{source}: no row; {allowed}; fix: correct the class or its files")
    for index in range(count):
        try:
            row = rows[index]
            # Rows of pandas are not mappings.
            cells = dict(row.to_dict() if hasattr(row, "to_dict") else row)
        except Exception as error:  # user-provided code
            raise BadRow(
                f"{source}: row {index} of {count}: {error!r}; {allowed}; fix: correct the class"
            ) from error
        yield DataRow(source, index, cells)


def _make_task(row: DataRow, place: str, settings: DatasetSettings) -> Task:
    messages = read_prompt_messages(row, settings.prompt_key, "data.prompt_key")
    source = row.read_cell(settings.reward_fn_key)
    if source in (None, ""):
        # The name of the file without suffix, or of the class, that the row comes from.
        source = Path(row.source.partition("=")[2].strip("'\"")).stem
    truth = _ground_truth(row)
    if settings.reward.path is None:
        # The grader of the package must be able to compare an answer with the ground truth.
        try:
            read_truths(truth)
        except ValueError as error:
            why = f"or reward_model.ground_truth holds {str(truth)[:80]!r}"
            allowed = "a text, a number, a list of these, or a dictionary of aliases"
            columns = ", ".join(map(str, row.cells))
            fix = (
                f"one of the columns {columns} under that name, or custom_reward_function.path=FILE"
            )
            raise row.make_error("ground_truth", why, allowed, fix) from error
    return {
        "task_id": f"{NAME}/{place}",
        "data_source": str(source),
        "messages": messages,
        "ground_truth": truth,
        "extra_info": row.read_object("extra_info") or {},
    }


def _ground_truth(row: DataRow) -> Any:
    """Return the ground truth of the row, or None. Raises ``BadRow`` for an unsupported style."""
    reward_model = row.read_object("reward_model") or {}
    if reward_model.get("style") not in SUPPORTED_STYLES:
        why = f"has the style {reward_model['style']!r}"
        known_styles = ", ".join(style for style in SUPPORTED_STYLES if style)
        fix = "grade with custom_reward_function.path=FILE"
        raise row.make_error("reward_model", why, known_styles, fix)
    truth = reward_model.get("ground_truth")
    return row.read_cell("ground_truth") if truth is None else truth
