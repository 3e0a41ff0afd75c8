"""``data``: how much is trained on per iteration and how long rows may be."""

from typing import Any

from verl.trainer.config.schema.accepted import AcceptedData
from verl.utils.settings import (
    PositiveInt,
)


class DataConfig(AcceptedData):
    """Batch sizes are counted in tasks (prompts), lengths in tokens."""

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
