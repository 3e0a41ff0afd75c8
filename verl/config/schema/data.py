"""Section ``data``: files of prompts, batch size and length of rows."""

from typing import Annotated, Any, Literal

from verl.config.settings import VERL, VERL_AGENT, PositiveInt, RunsCode, Section, Unused


class CustomClass(Section):
    """Section ``data.custom_cls``: a user-provided dataset class."""

    path: Annotated[str | None, RunsCode()] = None
    """Python file that defines the dataset class"""
    name: str | None = None
    """name of the dataset class in its file"""


class DataConfig(Section):
    """Files of prompts, batch sizes in tasks (prompts), and lengths in tokens.

    If ``data.train_files`` names files, every row is a task of one turn. The config then must not
    name an environment.
    """

    val_batch_size: Annotated[
        PositiveInt | None,
        Unused("the whole validation set is one batch; its size is env.val_tasks", VERL),
    ] = None
    """tasks validated at once; null: the whole validation set"""
    return_raw_chat: Annotated[bool, Unused("messages are always kept", VERL_AGENT)] = False
    """keep the message list in addition to the tokens"""
    image_key: Annotated[
        str,
        Unused("prompts of files are text; images come from environments", VERL, "leave it out"),
    ] = "images"
    """column of the files that holds images"""
    train_files: list[str] = []
    """Parquet or JSON-lines files of prompts to train on, for jobs without an environment; the
    placeholder files in job scripts for environments are ignored"""
    val_files: list[str] = []
    """Parquet or JSON-lines files of prompts to validate on"""
    prompt_key: str = "prompt"
    """column of the files that holds the prompt: messages, or the text of one user message"""
    reward_fn_key: str = "data_source"
    """column of the files with the source of a row; results are reported by source"""
    custom_cls: CustomClass = CustomClass()
    """a user-provided dataset class: called with the files, it returns an object with __len__ and
    __getitem__"""
    filter_overlong_prompts: bool = False
    """drop rows of files whose prompt is longer than max_prompt_length"""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """without filter_overlong_prompts, treatment of a prompt longer than max_prompt_length: error,
    or cut its last message at the left, at the right or in the middle"""
    train_batch_size: PositiveInt = 16
    """tasks per training step; env.rollout.n trajectories are generated for each"""
    max_prompt_length: PositiveInt = 2048
    """P: longest prompt of a row, in tokens"""
    max_response_length: PositiveInt = 512
    """R: longest response of a row, in tokens: one turn (window) or the trajectory (append)"""
    apply_chat_template_kwargs: dict[str, Any] = {}
    """arguments of the chat template, as {enable_thinking: false}"""
    shuffle: bool = True
    """use a seeded permutation of the tasks in every epoch; false: the order of the files"""
