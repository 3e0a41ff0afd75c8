"""Trajectories as readable JSON lines: what was seen, thought and done, and the credit every
sampled token got.

One object per row of the batch, that is per trajectory (``append`` history) or per step (``window`` history)::

    {"uid", "traj_uid", "task_id", "data_source", "won", "return", "length", "aborted", "prompt",
     "steps": [{"step", "observation", "response", "action", "reward", ...,
                "advantage": 0.31, "token_credit": [["<action>", 0.31], ["look", 0.42], ...]}]}
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from verl.protocol import DataProto

ROW_KEYS = {
    "uid": "uid",
    "traj_uid": "traj_uid",
    "task_id": "task_id",
    "data_source": "data_source",
    "won": "won",
    "return": "episode_rewards",
    "length": "episode_lengths",
    "aborted": "aborted",
}
DIGITS = 5  # of an advantage


def rollout_lines(batch: "DataProto", tokenizer: Any) -> Iterator[dict[str, Any]]:
    """One object per row of ``batch`` (see the module docstring).

    Reads ``prompts`` [B, P], ``responses``, ``response_mask``, ``step_ids`` [B, R],
    ``attention_mask`` [B, P+R], the object columns of the row format and, where the batch has them,
    ``advantages`` [B, R]; without advantages (in a validation) the credit is left out.
    ``tokenizer`` needs ``decode``.
    """
    tensors = {
        key: batch.batch[key].cpu().numpy()
        for key in ("prompts", "responses", "response_mask", "step_ids")
    }
    width = tensors["prompts"].shape[1]
    prompt_mask = batch.batch["attention_mask"][:, :width].cpu().numpy().astype(bool)
    credit = (
        batch.batch["advantages"].float().cpu().numpy()
        if "advantages" in set(batch.batch.keys())
        else None
    )
    texts = TokenTexts(tokenizer)
    others = batch.non_tensor_batch
    for row in range(len(batch)):
        line = {name: others[key][row] for name, key in ROW_KEYS.items() if key in others}
        line["prompt"] = tokenizer.decode(tensors["prompts"][row][prompt_mask[row]].tolist())
        advantages = None if credit is None else credit[row]
        sampled = tensors["response_mask"][row].astype(bool)
        steps = np.where(sampled, tensors["step_ids"][row], -1)
        line["steps"] = [
            {
                **record.to_json(),
                **_credit(tensors["responses"][row], advantages, steps == record.step, texts),
            }
            for record in others["steps"][row]
        ]
        yield line


def _credit(
    responses: np.ndarray, advantages: np.ndarray | None, where: np.ndarray, texts: "TokenTexts"
) -> dict:
    """The credit of the tokens at the True places of ``where`` [R]; ``responses`` and
    ``advantages`` are [R].
    """
    if advantages is None:
        return {}
    values = advantages[where]
    pairs = [
        [texts[int(i)], round(float(v), DIGITS)]
        for i, v in zip(responses[where], values, strict=True)
    ]
    return {
        "advantage": round(float(values.mean()), DIGITS) if len(values) else 0.0,
        "token_credit": pairs,
    }


class TokenTexts(dict):
    """Token id -> its text, decoded once per token."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> str:
        self[token] = text = self._tokenizer.decode([token])
        return text
