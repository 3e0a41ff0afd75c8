"""RewardModelWorker: one rank of a model that scores a conversation with one number.

    messages ──▶ chat template of the model ──▶ tokens, right-padded ──▶ score of the last token

Every rank holds the whole model and scores its part of the rows. The model is neither sharded nor
trained.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from verl.config.schema.critic import RewardModelConfig
from verl.models.hub import model_directory
from verl.models.weights import load_weights
from verl.protocol import DataProto
from verl.records import MESSAGES, MODEL_SCORES
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.base.worker_group import Worker
from verl.utils.chat_tokens import ChatTextEncoder
from verl.workers.collectives import resolve_device
from verl.workers.rows import make_micro_batches


class ConversationEncoder:
    """Encoder of conversations by the chat template of ``tokenizer``, a Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Return the token ids of ``messages`` rendered by the chat template.

        Text of a message that looks like a control token is encoded as ordinary text.
        """
        mark_control_tokens = self._chat_tokens.mark_control_tokens
        marked_messages = [
            {**message, "content": mark_control_tokens(message["content"])} for message in messages
        ]
        return list(self._chat_tokens.encode(self._render(marked_messages)))

    @cached_property
    def _chat_tokens(self) -> ChatTextEncoder:
        return ChatTextEncoder(self._tokenizer, self._render([{"role": "user", "content": ""}]))

    def _render(self, messages: list[dict[str, str]]) -> str:
        return self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=False
        )


class RewardModelWorker(Worker):
    """One rank of a reward model: a sequence-classification model with one label."""

    def __init__(
        self,
        config: RewardModelConfig,
        seed: int = 0,
        num_threads: int | None = None,
        device: str = "auto",
    ) -> None:
        del seed  # unused
        self.config = config
        self.device_name = resolve_device(device)
        self._model: Any = None
        self._encode_conversation: Any = None
        if num_threads:
            torch.set_num_threads(num_threads)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load model and tokenizer."""
        from transformers import AutoTokenizer

        assert self.config.model.path is not None  # checked for a run with a reward model
        directory = model_directory(self.config.model.path)
        dtype = getattr(torch, self.config.dtype or "float32")
        trust_remote_code = self.config.model.trust_remote_code
        model = load_weights(directory, "reward", dtype=dtype, trust_remote_code=trust_remote_code)
        tokenizer = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=trust_remote_code
        )
        self._encode_conversation = ConversationEncoder(tokenizer)
        self._model = model.to(self.device_name).eval()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """Compute ``rm_scores`` [B] float32 of the column ``messages``; NaN without messages."""
        scores = torch.full((len(data),), torch.nan)
        conversations = data.non_tensor_batch[MESSAGES]
        rows = [row for row, messages in enumerate(conversations) if len(messages)]
        tokens = [self._encode_truncated(conversations[row]) for row in rows]
        micro_batch_size = self.config.micro_batch_size_per_gpu
        for indices in make_micro_batches([len(ids) for ids in tokens], max_rows=micro_batch_size):
            batch_scores = last_token_scores(self._model, [tokens[index] for index in indices])
            scores[[rows[index] for index in indices]] = batch_scores
        if self.device_name == "cuda":
            torch.cuda.empty_cache()  # makes the memory available to the rollout engine
        return DataProto.from_dict({MODEL_SCORES: scores})

    def _encode_truncated(self, messages: Sequence[dict[str, str]]) -> list[int]:
        token_ids = self._encode_conversation(messages)
        max_length = self.config.max_length
        # Tokens are removed at the start, because the answer is at the end.
        return token_ids if max_length is None else token_ids[-max_length:]


@torch.no_grad()
def last_token_scores(model: Any, rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the scores [N] float32 of ``model`` at the last token of each of ``rows``.

    transformers reads the score at the last token that is not the padding token. If the padding
    token is also the end-of-turn token, this would be one token too early. Therefore rows are
    padded with a token that no row contains.
    """
    used_tokens = {token for row in rows for token in row}
    padding_token = next(
        token for token in range(model.config.vocab_size) if token not in used_tokens
    )
    tokens = [torch.tensor(row) for row in rows]
    padded_ids = pad_sequence(tokens, batch_first=True, padding_value=padding_token)
    attention_mask = pad_sequence([torch.ones_like(row) for row in tokens], batch_first=True)
    device = next(model.parameters()).device
    previous_pad_token_id = model.config.pad_token_id
    model.config.pad_token_id = padding_token
    try:
        logits = model(
            input_ids=padded_ids.to(device), attention_mask=attention_mask.to(device)
        ).logits
    finally:
        model.config.pad_token_id = previous_pad_token_id
    return logits.squeeze(-1).float().cpu()
