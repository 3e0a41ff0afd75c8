"""Tasks made of the rows of data files.

The columns are those of verl's single-turn data::

    prompt        [{"role": "user", "content": str}, ...], JSON of this list, or the user's text
    data_source   str, optional: origin of the row; default: name of the file
    reward_model  {"ground_truth": ...}, the right answer; or a column ground_truth
    extra_info    {...}, optional: passed to the grader
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent_system.environments.env import Task
from agent_system.environments.env_package.dataset.grading import read_truths
from agent_system.environments.env_package.dataset.settings import DatasetSettings
from agent_system.reward_manager.custom import load_function
from verl.utils.limits import USER_CODE_ERRORS, describe_raised_error
from verl.utils.message_rows import DataRow, InvalidRowError, read_prompt_messages, read_table

NAME = "dataset"
SUPPORTED_STYLES = (None, "", "rule", "model")  # supported values of reward_model["style"]
CLASS_NAME_KEY = "data.custom_cls.name"
logger = logging.getLogger(__name__)


def list_tasks(settings: DatasetSettings, split: str, section: str = "data") -> list[Task]:
    """Return one task per row of the split's files, in order.

    ``section`` is the config section that error messages name. Raises ``InvalidRowError`` if no
    file is set, a file cannot be read, or a row is invalid.
    """
    files = settings.val_files if split == "val" else settings.train_files
    files_key = f"{section}.{split}_files"
    if not files:
        raise InvalidRowError(
            f"{files_key}=[] names no file of {split} prompts; allowed: Parquet or JSON-lines "
            f"files; fix: set {files_key}=[FILE] (or env.{NAME}.{split}_files)",
            "missing_key",
        )
    rows = (
        read_table(files_key, files)
        if settings.custom_cls.path is None
        else _read_custom_class_rows(settings, files)
    )
    tasks = [_make_task(row, f"{split}/{index}", settings) for index, row in enumerate(rows)]
    ids_without_truth = [task["task_id"] for task in tasks if task["ground_truth"] is None]
    if 0 < len(ids_without_truth) < len(tasks):
        logger.warning(
            "%s: %d of %d rows have no ground truth; the first is %s; the reward function gets "
            "ground_truth=None for them",
            files_key,
            len(ids_without_truth),
            len(tasks),
            ids_without_truth[0],
        )
    return tasks


def _read_custom_class_rows(settings: DatasetSettings, files: list[str]) -> Iterator[DataRow]:
    """Yield the rows of the user-provided data set class ``settings.custom_cls``."""
    path, class_name = settings.custom_cls.path, settings.custom_cls.name or ""
    class_source = f"{CLASS_NAME_KEY}={class_name!r}"
    allowed = "allowed: a class called with the files, with a length and that many rows"
    try:
        rows = load_function(str(path), class_name, "env.dataset.custom_cls")(list(files))
        num_rows = len(rows)
    except USER_CODE_ERRORS as error:  # user-provided code
        error_text = describe_raised_error(error)
        message = f"{class_source}: {error_text}; {allowed}; fix: correct the class"
        raise InvalidRowError(message, "failed_call") from error
    if not num_rows:
        message = f"{class_source}: no row; {allowed}; fix: correct the class or its files"
        raise InvalidRowError(message, "no_rows")
    for index in range(num_rows):
        try:
            row = rows[index]
            # Convert rows of pandas, which are not mappings.
            cells = dict(row.to_dict() if hasattr(row, "to_dict") else row)
        except USER_CODE_ERRORS as error:  # user-provided code
            raise InvalidRowError(
                f"{class_source}: row {index} of {num_rows}: {describe_raised_error(error)}; "
                f"{allowed}; fix: correct the class",
                "failed_call",
            ) from error
        yield DataRow(class_source, index, cells)


def _make_task(row: DataRow, row_id: str, settings: DatasetSettings) -> Task:
    messages = read_prompt_messages(row, settings.prompt_key, "data.prompt_key")
    data_source = row.read_cell(settings.reward_fn_key)
    if data_source in (None, ""):
        data_source = Path(row.source.partition("=")[2].strip("'\"")).stem
    truth = _read_ground_truth(row)
    if settings.reward.path is None:
        try:
            read_truths(truth)
        except ValueError as error:
            problem = f"or reward_model.ground_truth holds {str(truth)[:80]!r}"
            allowed = "a text, a number, a list of these, or a dictionary of aliases"
            column_names = ", ".join(map(str, row.cells))
            fix = (
                f"one of the columns {column_names} under that name, or "
                "custom_reward_function.path=FILE"
            )
            raise row.make_error("ground_truth", problem, allowed, fix) from error
    return {
        "task_id": f"{NAME}/{row_id}",
        "data_source": str(data_source),
        "messages": messages,
        "ground_truth": truth,
        "extra_info": row.read_object("extra_info") or {},
    }


def _read_ground_truth(row: DataRow) -> Any:
    """Return the ground truth of the row, or None. Refuse an unsupported ``style``."""
    reward_model = row.read_object("reward_model") or {}
    if reward_model.get("style") not in SUPPORTED_STYLES:
        problem = f"has the style {reward_model['style']!r}"
        allowed_styles = ", ".join(style for style in SUPPORTED_STYLES if style)
        fix = "grade with custom_reward_function.path=FILE"
        raise row.make_error("reward_model", problem, allowed_styles, fix)
    truth = reward_model.get("ground_truth")
    return row.read_cell("ground_truth") if truth is None else truth
