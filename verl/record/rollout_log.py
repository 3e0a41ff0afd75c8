"""Trajectories as readable JSON lines: what was seen, thought and done, and the credit every
sampled token got.

One object per row of the batch, that is per trajectory (``append`` history) or per step (``window``
history)::

    {"uid", "traj_uid", "task_id", "data_source", "won", "return", "length", "aborted", "prompt",
     "steps": [{"step", "observation", "response", "action", "reward", ...,
                "advantage": 0.31, "token_credit": [["<action>", 0.31], ["look", 0.42], ...]}]}

What else is known of the tokens of a training step has a file of its own (``token_lines``).
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
DIGITS = 5  # of an advantage
ENTROPY_DIGITS = 3
GAP_DIGITS = 2  # of any size: gaps have no places of their own
NOWHERE = np.empty(0, dtype=np.intp)


class Decoder(Protocol):
    """A tokenizer that turns ids into text."""

    # Transformers promises a text or a list of texts, whatever the ids are: a text for one list.
    def decode(self, token_ids: list[int], /) -> Any: ...


def rollout_lines(batch: "DataProto", tokenizer: Decoder) -> Iterator[dict[str, Any]]:
    """One object per row of ``batch`` (see the module docstring).

    Reads ``prompts`` [B, P], ``responses``, ``response_mask``, ``step_ids`` [B, R],
    ``attention_mask`` [B, P+R], the object columns of the row format and, where the batch has them,
    ``advantages`` [B, R]; without advantages (in a validation) the credit is left out.
    """
    keys = ("prompts", "responses", "response_mask", "step_ids", "attention_mask")
    tensors = {key: batch.batch[key].cpu().numpy() for key in keys}
    advantages: np.ndarray | None = None
    if "advantages" in set(batch.batch.keys()):
        advantages = batch.batch["advantages"].float().cpu().numpy()
    texts = TokenTexts(tokenizer)
    columns = batch.non_tensor_batch
    for row in range(len(batch)):
        line = {name: columns[key][row] for name, key in ROW_KEYS.items() if key in columns}
        prompts = tensors["prompts"][row]
        is_prompt = tensors["attention_mask"][row][: len(prompts)].astype(bool)
        line["prompt"] = tokenizer.decode(prompts[is_prompt].tolist())
        # Between the turns of one step stand tokens that the policy did not sample.
        is_sampled = tensors["response_mask"][row].astype(bool)
        places = places_of(np.where(is_sampled, tensors["step_ids"][row], -1))
        line["steps"] = []
        for record in columns["steps"][row]:
            step = record.to_json()
            if advantages is not None:
                own = places.get(record.step, NOWHERE)
                step |= _credit(tensors["responses"][row][own], advantages[row][own], texts)
            line["steps"].append(step)
        yield line


def _credit(tokens: np.ndarray, advantages: np.ndarray, texts: "TokenTexts") -> dict[str, Any]:
    """Mean credit of a step, and the credit of each of its sampled ``tokens`` [N]."""
    # Tuples, and no loop: there are millions of them in a large step.
    pairs = list(zip(texts.of(tokens), rounded(advantages, DIGITS).tolist(), strict=True))
    mean = round(float(advantages.mean()), DIGITS) if len(advantages) else 0.0
    return {"advantage": mean, "token_credit": pairs}


def token_lines(batch: "DataProto", tokenizer: Decoder) -> Iterator[dict[str, Any]]:
    """One object per row of ``batch``, in the order of ``rollout_lines``, of all tokens of its
    turns, sampled or not::

        {"traj_uid", "steps": [{"step", "tokens": ["<s>", "look", ...], "mask": [0, 1, ...],
                                "weight", "entropy", "gap", "state"}]}

    ``mask`` is 1 on sampled tokens. Where the batch has them: ``weight``, what the rollout
    correction makes the token's loss weigh; ``entropy``, nats; ``gap``, the engine's log-prob less
    the trainer's, null where the engine's is 0, that is certain or unknown; ``state``, what the
    step's state is known by if that is not its observation.
    """
    keys = {"responses", "response_mask", "step_ids"}
    optional = {"entropys", "rollout_log_probs", "old_log_probs", CORRECTION_WEIGHTS}
    present = keys | (optional & set(batch.batch.keys()))
    tensors = {key: batch.batch[key].float().cpu().numpy() for key in present - keys}
    tensors |= {key: batch.batch[key].cpu().numpy() for key in keys}
    texts = TokenTexts(tokenizer)
    columns = batch.non_tensor_batch
    for row in range(len(batch)):
        numbers = _token_numbers({key: tensor[row] for key, tensor in tensors.items()})
        responses = tensors["responses"][row]
        places = places_of(tensors["step_ids"][row])
        steps = []
        for place, record in enumerate(columns["steps"][row]):
            own = places.get(record.step, NOWHERE)
            step = {"step": record.step, "tokens": texts.of(responses[own])}
            step |= {name: values[own] for name, values in numbers.items()}
            state = columns["anchor_obs"][row][place] if "anchor_obs" in columns else None
            if state not in (None, record.observation):
                step["state"] = str(state)
            steps.append(step)
        yield {"traj_uid": columns["traj_uid"][row], "steps": steps}


def _token_numbers(of_row: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What is known of the tokens of a row, by the name that a line has for it: [R] each."""
    found = {"mask": of_row["response_mask"].astype(np.int8)}
    if CORRECTION_WEIGHTS in of_row:
        found["weight"] = rounded(of_row[CORRECTION_WEIGHTS], ENTROPY_DIGITS)
    # Without entropies nobody but the engine has scored these tokens.
    if "entropys" not in of_row:
        return found
    found["entropy"] = rounded(of_row["entropys"], ENTROPY_DIGITS)
    if "rollout_log_probs" in of_row and "old_log_probs" in of_row:
        engine = of_row["rollout_log_probs"]
        gaps = significant(engine - of_row["old_log_probs"], GAP_DIGITS)
        found["gap"] = np.where(engine != 0, gaps, np.nan)
    return found


def places_of(step_ids: np.ndarray) -> dict[int, np.ndarray]:
    """Where the tokens of each step stand in a row, from ``step_ids`` [R]."""
    order = np.argsort(step_ids, kind="stable")
    steps, firsts = np.unique(step_ids[order], return_index=True)
    return dict(zip(steps.tolist(), np.split(order, firsts[1:]), strict=True))


def rounded(values: np.ndarray, digits: int) -> np.ndarray:
    """``values`` (float32) to ``digits`` decimal places, as ``round`` has them: in float64 the
    product with a power of ten is exact.
    """
    return np.round(values.astype(np.float64), digits)


def significant(values: np.ndarray, digits: int) -> np.ndarray:
    """``values`` (float32) to ``digits`` significant digits, as ``format`` has them, in float64;
    below 1e-20 there are fewer.
    """
    exact = values.astype(np.float64)
    known = np.isfinite(exact) & (exact != 0)
    size = np.floor(np.log10(np.abs(exact), where=known, out=np.zeros_like(exact)))
    # Powers of ten are exact up to the 22nd: what is divided by one is the number that is meant.
    places = np.clip(digits - 1 - size, -22, 22)
    up, down = 10.0 ** np.maximum(places, 0), 10.0 ** np.maximum(-places, 0)
    return np.rint(exact * up / down) / up * down


class TokenTexts(dict[int, str]):
    """Token id -> its text, decoded once per token."""

    def __init__(self, tokenizer: Decoder) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def of(self, tokens: np.ndarray) -> list[str]:
        """The texts of ``tokens`` [N]."""
        return list(map(self.__getitem__, tokens.tolist()))

    def __missing__(self, token: int) -> str:
        text = self._tokenizer.decode([token])
        self[token] = text
        return text
