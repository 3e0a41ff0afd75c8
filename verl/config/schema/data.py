"""``data``: which files are trained on, how much of them per iteration, how long rows may be."""

from typing import Annotated, Any, Literal

from verl.config.schema.accepted import AcceptedData
from verl.config.settings import PositiveInt, RunsCode, Section


class CustomClass(Section):
    """``data.custom_cls``: a dataset class of the user's own."""

    path: Annotated[str | None, RunsCode()] = None
    """Python file that defines the dataset class"""
    name: str | None = None
    """name of the dataset class in its file"""


class DataConfig(AcceptedData):
    """Batch sizes are counted in tasks (prompts), lengths in tokens.

    Files make a job about data: every row is a task of one step, and no environment is named.
    """

    train_files: list[str] = []
    """Parquet or JSON-lines files of prompts to train on, where no environment is played; the
    placeholders that job scripts for environments name are passed over"""
    val_files: list[str] = []
    """Parquet or JSON-lines files of prompts to validate on"""
    prompt_key: str = "prompt"
    """column of the files that holds the prompt: messages, or the text of one user message"""
    reward_fn_key: str = "data_source"
    """column of the files that says where a row is from; results are reported by it"""
    custom_cls: CustomClass = CustomClass()
    """a dataset class of the user's own: called with the files, it has a length and rows by
    number"""
    filter_overlong_prompts: bool = False
    """leave out rows of files whose prompt is longer than max_prompt_length"""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """what else happens to a row of a file whose prompt is longer than max_prompt_length: the run
    is refused, or its last message is cut at the left, at the right or in the middle"""
    train_batch_size: PositiveInt = 16
    """tasks per iteration; each is played env.rollout.n times"""
    max_prompt_length: PositiveInt = 2048
    """P: longest prompt of a row, in tokens"""
    max_response_length: PositiveInt = 512
    """R: longest response of a row: one turn (window) or the play (append)"""
    apply_chat_template_kwargs: dict[str, Any] = {}
    """arguments of the chat template, as {enable_thinking: false}"""
    shuffle: bool = True
    """every epoch is a seeded permutation of the tasks; false: they come in their order"""
