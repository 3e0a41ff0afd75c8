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
GAP_FORM = "{:.2g}"  # gaps may be of any size


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
        step_of = np.where(is_sampled, tensors["step_ids"][row], -1)
        line["steps"] = []
        for record in columns["steps"][row]:
            step = record.to_json()
            if advantages is not None:
                own = step_of == record.step
                step |= _credit(tensors["responses"][row][own], advantages[row][own], texts)
            line["steps"].append(step)
        yield line


def _credit(tokens: np.ndarray, advantages: np.ndarray, texts: "TokenTexts") -> dict[str, Any]:
    """Mean credit of a step, and the credit of each of its sampled ``tokens`` [N]."""
    # Tuples, and no loop: there are millions of them in a large step.
    pairs = list(zip(texts.of(tokens), rounded(advantages, DIGITS), strict=True))
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
        of_row = {key: tensor[row] for key, tensor in tensors.items()}
        steps = []
        for place, record in enumerate(columns["steps"][row]):
            own = of_row["step_ids"] == record.step
            step = {"step": record.step} | _token_numbers(of_row, own, texts)
            state = columns["anchor_obs"][row][place] if "anchor_obs" in columns else None
            if state not in (None, record.observation):
                step["state"] = str(state)
            steps.append(step)
        yield {"traj_uid": columns["traj_uid"][row], "steps": steps}


def _token_numbers(
    of_row: dict[str, np.ndarray], own: np.ndarray, texts: "TokenTexts"
) -> dict[str, Any]:
    """What is known of the tokens of a row [R] where ``own`` [R] holds."""
    found: dict[str, Any] = {
        "tokens": texts.of(of_row["responses"][own]),
        "mask": of_row["response_mask"][own].astype(int).tolist(),
    }
    if CORRECTION_WEIGHTS in of_row:
        found["weight"] = rounded(of_row[CORRECTION_WEIGHTS][own], ENTROPY_DIGITS)
    # Without entropies nobody but the engine has scored these tokens.
    if "entropys" not in of_row:
        return found
    found["entropy"] = rounded(of_row["entropys"][own], ENTROPY_DIGITS)
    if "rollout_log_probs" in of_row and "old_log_probs" in of_row:
        engine = of_row["rollout_log_probs"][own]
        gaps = (engine - of_row["old_log_probs"][own]).tolist()
        found["gap"] = [
            float(GAP_FORM.format(gap)) if told else None
            for gap, told in zip(gaps, engine.tolist(), strict=True)
        ]
    return found


def rounded(values: np.ndarray, digits: int) -> list[float]:
    """``values`` (float32) to ``digits`` decimal places, as ``round`` has them: in float64 the
    product with a power of ten is exact.
    """
    return np.round(values.astype(np.float64), digits).tolist()


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
