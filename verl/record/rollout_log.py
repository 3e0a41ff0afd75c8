"""Trajectories as JSON lines: observations, replies, actions and advantages of sampled tokens.

One object per row of the batch: per trajectory with ``append`` history, per turn with ``window``
history:

```
{"uid", "traj_uid", "task_id", "data_source", "won", "return", "length", "aborted", "prompt",
 "steps": [{"step", "observation", "response", "action", "reward", ...,
            "advantage": 0.31, "token_credit": [["<action>", 0.31], ["look", 0.42], ...]}]}
```

Other values of the tokens of a training step are in a separate file (``token_lines``).
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from verl.records import CORRECTION_WEIGHTS

if TYPE_CHECKING:
    from verl.protocol import DataProto

ROW_KEYS = {  # name in the file -> column of the batch
    "uid": "uid",
    "traj_uid": "traj_uid",
    "task_id": "task_id",
    "data_source": "data_source",
    "won": "won",
    "return": "episode_rewards",
    "length": "episode_lengths",
    "aborted": "aborted",
}
DIGITS = 5  # decimal places of an advantage
ENTROPY_DIGITS = 3
GAP_DIGITS = 2  # significant digits, because gaps differ by orders of magnitude
NO_POSITIONS = np.empty(0, dtype=np.intp)


class Decoder(Protocol):
    """Tokenizer that converts ids to text."""

    # Any, because transformers annotates text or list of texts. One list of ids gives a text.
    def decode(self, token_ids: list[int], /) -> Any: ...


def rollout_lines(batch: "DataProto", tokenizer: Decoder) -> Iterator[dict[str, Any]]:
    """Yield one object per row of ``batch`` (see the module docstring).

    Reads ``prompts`` [B, P], ``responses``, ``response_mask``, ``step_ids`` [B, R],
    ``attention_mask`` [B, P+R], the object columns and ``advantages`` [B, R], which validations
    lack.
    """
    keys = ("prompts", "responses", "response_mask", "step_ids", "attention_mask")
    tensors = {key: batch.batch[key].cpu().numpy() for key in keys}
    advantages: np.ndarray | None = None
    if "advantages" in set(batch.batch.keys()):
        advantages = batch.batch["advantages"].float().cpu().numpy()
    texts = TokenTextCache(tokenizer)
    columns = batch.non_tensor_batch
    for row in range(len(batch)):
        line = {name: columns[key][row] for name, key in ROW_KEYS.items() if key in columns}
        prompts = tensors["prompts"][row]
        is_prompt = tensors["attention_mask"][row][: len(prompts)].astype(bool)
        line["prompt"] = tokenizer.decode(prompts[is_prompt].tolist())
        # Tokens that the policy did not sample have no advantage.
        is_sampled = tensors["response_mask"][row].astype(bool)
        positions = positions_by_step(np.where(is_sampled, tensors["step_ids"][row], -1))
        line["steps"] = []
        for record in columns["steps"][row]:
            step = record.to_json()
            if advantages is not None:
                turn = positions.get(record.step, NO_POSITIONS)
                step |= _turn_credit(tensors["responses"][row][turn], advantages[row][turn], texts)
            line["steps"].append(step)
        yield line


def _turn_credit(
    tokens: np.ndarray, advantages: np.ndarray, texts: "TokenTextCache"
) -> dict[str, Any]:
    """Return the mean advantage of a turn, and the advantage of each of its ``tokens`` [N]."""
    # No Python loop: a large step has millions of tokens.
    credits = round_decimals(advantages, DIGITS).tolist()
    pairs = list(zip(texts.decode_each(tokens), credits, strict=True))
    mean = round(float(advantages.mean()), DIGITS) if len(advantages) else 0.0
    return {"advantage": mean, "token_credit": pairs}


def token_lines(batch: "DataProto", tokenizer: Decoder) -> Iterator[dict[str, Any]]:
    """Yield one object per row of ``batch`` with all tokens of its turns.

    The order is that of ``rollout_lines``. The format is::

        {"traj_uid", "steps": [{"step", "tokens": ["<s>", "look", ...], "mask": [0, 1, ...],
                                "weight", "entropy", "gap", "state"}]}

    ``mask`` is 1 on sampled tokens. The other values are optional. ``weight`` is the loss weight of
    the rollout correction, ``entropy`` is in nats. ``gap`` is the engine's log-prob minus the
    trainer's, null where the engine's is 0 (certain or unknown). ``state`` is the name of the
    turn's state if it differs from the observation.
    """
    keys = {"responses", "response_mask", "step_ids"}
    optional = {"entropys", "rollout_log_probs", "old_log_probs", CORRECTION_WEIGHTS}
    present_keys = keys | (optional & set(batch.batch.keys()))
    tensors = {key: batch.batch[key].float().cpu().numpy() for key in present_keys - keys}
    tensors |= {key: batch.batch[key].cpu().numpy() for key in keys}
    texts = TokenTextCache(tokenizer)
    columns = batch.non_tensor_batch
    for row in range(len(batch)):
        numbers = _token_numbers({key: tensor[row] for key, tensor in tensors.items()})
        responses = tensors["responses"][row]
        positions = positions_by_step(tensors["step_ids"][row])
        steps = []
        for index, record in enumerate(columns["steps"][row]):
            turn = positions.get(record.step, NO_POSITIONS)
            step = {"step": record.step, "tokens": texts.decode_each(responses[turn])}
            step |= {name: values[turn] for name, values in numbers.items()}
            state = columns["anchor_obs"][row][index] if "anchor_obs" in columns else None
            if state not in (None, record.observation):
                step["state"] = str(state)
            steps.append(step)
        yield {"traj_uid": columns["traj_uid"][row], "steps": steps}


def _token_numbers(of_row: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the ``mask``, ``weight``, ``entropy`` and ``gap`` [R] that the batch has of a row."""
    values = {"mask": of_row["response_mask"].astype(np.int8)}
    if CORRECTION_WEIGHTS in of_row:
        values["weight"] = round_decimals(of_row[CORRECTION_WEIGHTS], ENTROPY_DIGITS)
    # Without entropies the trainer has not scored these tokens, so there is no gap either.
    if "entropys" not in of_row:
        return values
    values["entropy"] = round_decimals(of_row["entropys"], ENTROPY_DIGITS)
    if "rollout_log_probs" in of_row and "old_log_probs" in of_row:
        engine = of_row["rollout_log_probs"]
        gaps = round_significant(engine - of_row["old_log_probs"], GAP_DIGITS)
        values["gap"] = np.where(engine != 0, gaps, np.nan)
    return values


def positions_by_step(step_ids: np.ndarray) -> dict[int, np.ndarray]:
    """Return the token positions of each turn of a row, from ``step_ids`` [R]."""
    order = np.argsort(step_ids, kind="stable")
    steps, firsts = np.unique(step_ids[order], return_index=True)
    return dict(zip(steps.tolist(), np.split(order, firsts[1:]), strict=True))


def round_decimals(values: np.ndarray, digits: int) -> np.ndarray:
    """Round ``values`` (float32) to ``digits`` decimal places, in float64 as ``round`` does."""
    return np.round(values.astype(np.float64), digits)


def round_significant(values: np.ndarray, digits: int) -> np.ndarray:
    """Round float32 ``values`` to ``digits`` significant digits in float64 (fewer below 1e-20)."""
    doubles = values.astype(np.float64)
    has_exponent = np.isfinite(doubles) & (doubles != 0)
    size = np.floor(np.log10(np.abs(doubles), where=has_exponent, out=np.zeros_like(doubles)))
    # Powers of ten are exact in float64 up to the 22nd, so the quotient is correctly rounded.
    decimal_places = np.clip(digits - 1 - size, -22, 22)
    up, down = 10.0 ** np.maximum(decimal_places, 0), 10.0 ** np.maximum(-decimal_places, 0)
    return np.rint(doubles * up / down) / up * down


class TokenTextCache(dict[int, str]):
    """Cache of token texts by token id."""

    def __init__(self, tokenizer: Decoder) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def decode_each(self, tokens: np.ndarray) -> list[str]:
        """Return the text of each of ``tokens`` [N]."""
        return list(map(self.__getitem__, tokens.tolist()))

    def __missing__(self, token: int) -> str:
        text = self._tokenizer.decode([token])
        self[token] = text
        return text
