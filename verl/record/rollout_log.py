"""Trajectories as JSON lines: observations, replies, actions and advantages of sampled tokens.

Each line is the object of one row of the batch. With ``env.history=append`` a row is a trajectory,
with ``window`` it is a turn.

```
{"uid", "traj_uid", "task_id", "data_source", "won", "return", "length", "aborted", "prompt",
 "steps": [{"step", "observation", "response", "action", "reward", ...,
            "advantage": 0.31, "token_credit": [["<action>", 0.31], ["look", 0.42], ...]}],
 "summary": {"step", "response", "num_tokens", "stop_reason", "span", "advantage", ...}}
```

``summary`` is the policy's summary of the episode so far (``env.compact``), which ends the row.
Rows without it lack the key.

Entropies and other values per token are in a separate file (``format_token_lines``).
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from verl.records import CORRECTION_WEIGHTS, SUMMARY
from verl.utils import jsonl

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
ADVANTAGE_DIGITS = 5  # decimal places of an advantage
ENTROPY_DIGITS = 3  # decimal places of an entropy or a loss weight
GAP_DIGITS = 2  # significant digits of a log-prob gap; gaps vary by orders of magnitude
NOT_SAMPLED = -2  # replaces the turn number of unsampled tokens
SUMMARY_STEP = -1  # ``step_ids`` of the tokens of a summary
NO_POSITIONS = np.empty(0, dtype=np.intp)


DecodeTokens = Callable[[np.ndarray], list[str]]  # token ids [N] -> text of each token


class TokenDecoder(Protocol):
    """Tokenizer that converts ids to text."""

    def decode(self, token_ids: list[int], /) -> Any: ...  # transformers: "text or list of texts"


def format_rollout_lines(batch: "DataProto", tokenizer: TokenDecoder) -> Iterator[dict[str, Any]]:
    """Yield the object of each row of ``batch`` for the rollout file (see the module docstring).

    Reads ``prompts`` [B, P], ``responses``, ``response_mask``, ``step_ids`` [B, R],
    ``attention_mask`` [B, P+R] and the columns with texts and turn records. ``advantages`` [B, R]
    are optional; a validation batch has none.
    """
    keys = ("prompts", "responses", "response_mask", "step_ids", "attention_mask")
    tensors = {key: batch.batch[key].cpu().numpy() for key in keys}
    advantages: np.ndarray | None = None
    if "advantages" in set(batch.batch.keys()):
        advantages = batch.batch["advantages"].float().cpu().numpy()
    decode_tokens = _make_token_decoder(tokenizer)
    columns = batch.non_tensor_batch
    for row in range(len(batch)):
        line = {name: columns[key][row] for name, key in ROW_KEYS.items() if key in columns}
        prompts = tensors["prompts"][row]
        is_prompt = tensors["attention_mask"][row][: len(prompts)].astype(bool)
        line["prompt"] = tokenizer.decode(prompts[is_prompt].tolist())
        positions_by_turn = _group_sampled_positions(
            tensors["step_ids"][row], tensors["response_mask"][row]
        )
        line["steps"] = [record.to_json() for record in columns["steps"][row]]
        summary = columns[SUMMARY][row] if SUMMARY in columns else None
        turns_and_summary = [(step["step"], step) for step in line["steps"]]
        if summary is not None:
            line[SUMMARY] = summary.to_json()
            turns_and_summary.append((SUMMARY_STEP, line[SUMMARY]))
        if advantages is not None:
            for step_id, turn_or_summary in turns_and_summary:
                turn_positions = positions_by_turn.get(step_id, NO_POSITIONS)
                tokens = tensors["responses"][row][turn_positions]
                turn_or_summary |= _format_turn_credit(
                    tokens, advantages[row][turn_positions], decode_tokens
                )
        yield line


def _make_token_decoder(tokenizer: TokenDecoder) -> DecodeTokens:
    decode_token = functools.cache(lambda token_id: tokenizer.decode([token_id]))
    return lambda tokens: list(map(decode_token, tokens.tolist()))


def _format_turn_credit(
    tokens: np.ndarray, advantages: np.ndarray, decode_tokens: DecodeTokens
) -> dict[str, Any]:
    """Return the mean advantage of a turn, and text and advantage of each of its ``tokens`` [N]."""
    rounded_advantages = round_decimals(advantages, ADVANTAGE_DIGITS).tolist()
    texts_and_advantages = list(zip(decode_tokens(tokens), rounded_advantages, strict=True))
    mean_advantage = round(float(advantages.mean()), ADVANTAGE_DIGITS) if len(advantages) else 0.0
    return {"advantage": mean_advantage, "token_credit": texts_and_advantages}


def format_token_lines(batch: "DataProto", tokenizer: TokenDecoder) -> Iterator[dict[str, Any]]:
    """Yield the object of each row of ``batch`` for the token file, with all tokens of its turns.

    Rows have the same order as in the rollout file. The format is::

        {"traj_uid", "steps": [{"step", "tokens": ["<s>", "look", ...], "mask": [0, 1, ...],
                                "weight", "entropy", "gap", "state"}],
         "summary": {"step", "tokens", "mask", ...}}

    ``mask`` is 1 on sampled tokens. ``weight``, ``entropy``, ``gap``, ``state`` and ``summary``
    (``env.compact``) are optional. ``weight`` is the loss weight of the rollout correction,
    ``entropy`` is in nats. ``gap`` is the engine's log-prob minus the trainer's. It is null where
    the engine's log-prob is 0: it is then unknown, or the token has probability 1. ``state`` is the
    environment's name of the turn's state (``anchor_obs``), if it differs from the observation.
    """
    keys = ("responses", "response_mask", "step_ids")
    tensors = {key: batch.batch[key].cpu().numpy() for key in keys}
    for key in ("entropys", "rollout_log_probs", "old_log_probs", CORRECTION_WEIGHTS):
        if key in set(batch.batch.keys()):
            tensors[key] = batch.batch[key].float().cpu().numpy()
    decode_tokens = _make_token_decoder(tokenizer)
    columns = batch.non_tensor_batch
    for row in range(len(batch)):
        token_values = _compute_token_values({key: tensor[row] for key, tensor in tensors.items()})
        responses = tensors["responses"][row]
        step_ids = tensors["step_ids"][row]
        positions_by_turn = group_positions_by_turn(step_ids)
        steps = []
        for index, record in enumerate(columns["steps"][row]):
            turn_positions = positions_by_turn.get(record.step, NO_POSITIONS)
            step = {"step": record.step, "tokens": decode_tokens(responses[turn_positions])}
            step |= _select_token_values(token_values, turn_positions)
            state = columns["anchor_obs"][row][index] if "anchor_obs" in columns else None
            if state not in (None, record.observation):
                step["state"] = str(state)
            steps.append(step)
        line = {"traj_uid": columns["traj_uid"][row], "steps": steps}
        summary = columns[SUMMARY][row] if SUMMARY in columns else None
        if summary is not None:
            sampled_positions = _group_sampled_positions(step_ids, token_values["mask"])
            summary_positions = sampled_positions.get(SUMMARY_STEP, NO_POSITIONS)
            tokens = decode_tokens(responses[summary_positions])
            line[SUMMARY] = {"step": summary.step, "tokens": tokens}
            line[SUMMARY] |= _select_token_values(token_values, summary_positions)
        yield line


def _select_token_values(
    token_values: Mapping[str, np.ndarray], positions: np.ndarray
) -> dict[str, np.ndarray]:
    return {name: values[positions] for name, values in token_values.items()}


def _compute_token_values(row_tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the token values of one row that a token file has, each [R].

    ``format_token_lines`` describes them. A value whose tensors are missing is omitted.
    """
    token_values = {"mask": row_tensors["response_mask"].astype(np.int8)}
    if CORRECTION_WEIGHTS in row_tensors:
        token_values["weight"] = round_decimals(row_tensors[CORRECTION_WEIGHTS], ENTROPY_DIGITS)
    if "entropys" not in row_tensors:
        return token_values
    token_values["entropy"] = round_decimals(row_tensors["entropys"], ENTROPY_DIGITS)
    if "rollout_log_probs" in row_tensors and "old_log_probs" in row_tensors:
        engine_log_probs = row_tensors["rollout_log_probs"]
        gaps = round_significant(engine_log_probs - row_tensors["old_log_probs"], GAP_DIGITS)
        token_values["gap"] = np.where(engine_log_probs != 0, gaps, np.nan)
    return token_values


def _group_sampled_positions(
    step_ids: np.ndarray, response_mask: np.ndarray
) -> dict[int, np.ndarray]:
    """Return turn number -> positions of its sampled tokens; -1 is the summary of the episode."""
    return group_positions_by_turn(np.where(response_mask.astype(bool), step_ids, NOT_SAMPLED))


def group_positions_by_turn(step_ids: np.ndarray) -> dict[int, np.ndarray]:
    """Return a dict turn number -> token positions, from the turn numbers ``step_ids`` [R]."""
    sorted_positions = np.argsort(step_ids, kind="stable")
    steps, first_indices = np.unique(step_ids[sorted_positions], return_index=True)
    return dict(zip(steps.tolist(), np.split(sorted_positions, first_indices[1:]), strict=True))


def round_decimals(values: np.ndarray, digits: int) -> np.ndarray:
    """Round ``values`` (float32) to ``digits`` decimal places, in float64 as ``round`` does."""
    return np.round(values.astype(np.float64), digits)


def round_significant(values: np.ndarray, digits: int) -> np.ndarray:
    """Round float32 ``values`` to ``digits`` significant digits, in float64.

    Values below about 1e-20 get fewer digits. 0.01234 with 2 digits gives 0.012.
    """
    values_64 = values.astype(np.float64)
    has_exponent = np.isfinite(values_64) & (values_64 != 0)
    zeros = np.zeros_like(values_64)
    exponents = np.floor(np.log10(np.abs(values_64), where=has_exponent, out=zeros))
    # Use at most 10**22: higher powers of ten are not exact in float64, and would round wrongly.
    decimal_places = np.clip(digits - 1 - exponents, -22, 22)
    scale_up = 10.0 ** np.maximum(decimal_places, 0)
    scale_down = 10.0 ** np.maximum(-decimal_places, 0)
    return np.rint(values_64 * scale_up / scale_down) / scale_up * scale_down


ENCODE_ROLLOUTS = jsonl.RowEncoder(
    format_rollout_lines, ("advantages",), (*ROW_KEYS.values(), "steps")
)
ENCODE_TOKENS = jsonl.RowEncoder(
    format_token_lines, ("entropys", "old_log_probs", CORRECTION_WEIGHTS), ("traj_uid", "steps")
)
