"""``data``: how much is trained on per iteration and how long rows may be."""

from dataclasses import dataclass
from typing import Any

from verl.trainer.config.schema.field import opt, section

NO_FILES = "tasks and their texts come from the environment"


@dataclass
class CustomClass:
    """``data.custom_cls``: a dataset class of the user's own."""

    path: str | None = opt(None, "Python file that defines the dataset class", unused=NO_FILES)
    name: str | None = opt(None, "name of the class in that file", unused=NO_FILES)


@dataclass
class DataConfig:
    """Batch sizes are counted in tasks (prompts), lengths in tokens."""

    train_files: list[str] = opt(
        [],
        "parquet or jsonl files of single-turn prompts; unused where an environment plays",
        unused=NO_FILES,
    )
    val_files: list[str] = opt([], "the same for validation", unused=NO_FILES)
    train_batch_size: int = opt(
        16, "tasks per iteration; each is played env.rollout.n times", low=1
    )
    val_batch_size: int | None = opt(
        None,
        "tasks validated at once; null: the whole panel",
        low=1,
        unused="the whole panel plays at once",
    )
    max_prompt_length: int = opt(2048, "P: longest prompt of a row, in tokens", low=1)
    max_response_length: int = opt(
        512, "R: longest response of a row: one turn (window) or the play (append)", low=1
    )
    filter_overlong_prompts: bool = opt(
        False, "drop prompts of files that are longer than max_prompt_length", unused=NO_FILES
    )
    truncation: str = opt(
        "error",
        "what happens to a longer prompt",
        choices=("error", "left", "right", "middle"),
        unused=NO_FILES,
    )
    return_raw_chat: bool = opt(
        False, "keep the message list beside the tokens", unused="messages are always kept"
    )
    apply_chat_template_kwargs: dict[str, Any] = opt(
        {}, "passed to the chat template, as {enable_thinking: false}"
    )
    prompt_key: str = opt("prompt", "column of the files that holds the messages", unused=NO_FILES)
    reward_fn_key: str = opt(
        "data_source",
        "column that tells the reward function what kind of prompt it is",
        unused=NO_FILES,
    )
    image_key: str = opt("images", "column that holds images", unused=NO_FILES)
    shuffle: bool = opt(
        True, "every epoch is a seeded permutation of the tasks; false: they come in their order"
    )
    custom_cls: CustomClass = section(CustomClass, "a dataset class of the user's own")
