"""``data``: how much is trained on per iteration and how long rows may be."""

from typing import Annotated, Any, Literal

from verl.utils.settings import (
    PositiveInt,
    Section,
    Unused,
)

NO_FILES = "tasks and their texts come from the environment"


class CustomClass(Section):
    """``data.custom_cls``: a dataset class of the user's own."""

    path: Annotated[str | None, Unused(NO_FILES)] = None
    """Python file that defines the dataset class"""
    name: Annotated[str | None, Unused(NO_FILES)] = None
    """name of the dataset class in its file"""


class DataConfig(Section):
    """Batch sizes are counted in tasks (prompts), lengths in tokens."""

    # Keys marked Unused are read because job scripts of this family of frameworks set them: a run
    # warns of those that were set, instead of refusing the script.
    train_files: Annotated[list[str], Unused(NO_FILES)] = []
    """parquet or jsonl files of single-turn prompts; unused where an environment plays"""
    val_files: Annotated[list[str], Unused(NO_FILES)] = []
    """parquet or jsonl files of single-turn prompts for validation"""
    train_batch_size: PositiveInt = 16
    """tasks per iteration; each is played env.rollout.n times"""
    val_batch_size: Annotated[PositiveInt | None, Unused("the whole panel plays at once")] = None
    """tasks validated at once; null: the whole panel"""
    max_prompt_length: PositiveInt = 2048
    """P: longest prompt of a row, in tokens"""
    max_response_length: PositiveInt = 512
    """R: longest response of a row: one turn (window) or the play (append)"""
    filter_overlong_prompts: Annotated[bool, Unused(NO_FILES)] = False
    """drop prompts of files that are longer than max_prompt_length"""
    truncation: Annotated[Literal["error", "left", "right", "middle"], Unused(NO_FILES)] = "error"
    """what happens to a prompt longer than max_prompt_length"""
    return_raw_chat: Annotated[bool, Unused("messages are always kept")] = False
    """keep the message list beside the tokens"""
    apply_chat_template_kwargs: dict[str, Any] = {}
    """arguments of the chat template, as {enable_thinking: false}"""
    prompt_key: Annotated[str, Unused(NO_FILES)] = "prompt"
    """column of the files that holds the messages"""
    reward_fn_key: Annotated[str, Unused(NO_FILES)] = "data_source"
    """column that tells the reward function what kind of prompt a row is"""
    image_key: Annotated[str, Unused(NO_FILES)] = "images"
    """column of the files that holds images"""
    shuffle: bool = True
    """every epoch is a seeded permutation of the tasks; false: they come in their order"""
    custom_cls: CustomClass = CustomClass()
    """a dataset class of the user's own"""
