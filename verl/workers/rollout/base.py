"""Protocol of rollout engines, and code shared by all engines: stop rules, counter-based seeds,
request checks.

This module imports neither torch nor vLLM, because an engine must set its environment variables
first.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

import numpy as np

from verl.names import BASE_MODEL, POLICY_MODEL
from verl.utils.sampling import SamplingRequest, SamplingResult

if TYPE_CHECKING:
    import torch

GREEDY_BELOW = 1e-5  # a temperature below this value means argmax
# Constants of the SplitMix64 generator: its increment (2**64 divided by the golden ratio) and the
# factors of its finaliser.
_GOLDEN_RATIO_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_FIRST_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = np.uint64(0x94D049BB133111EB)
_MASK_63_BITS = 0x7FFFFFFFFFFFFFFF  # seeds must fit the signed integers of torch and vLLM

Weights: TypeAlias = "Iterable[tuple[str, np.ndarray | torch.Tensor]]"
SleepLevel: TypeAlias = Literal[1, 2]
EnginePart: TypeAlias = Literal["weights", "kv_cache"]


class EngineError(RuntimeError):
    """Error for a call that an engine, or its rollout worker, cannot execute."""


class RolloutEngine(Protocol):
    """Blocking engine with continuous batching, called by a single thread.

    Input and output are token ids. Log-probs in results are those of the sampling distribution,
    after temperature, top-k and top-p. A greedy token has its log-prob at temperature 1. Tokens
    that complete a stop string, and an end-of-turn token, are included in ``token_ids``.

    The tokens of a seeded request depend on its seed, its prompt and the weights. Other requests in
    the batch affect them only by floating-point rounding.
    """

    gives_logprobs: bool  # class attribute; training refuses engines whose results lack log-probs
    policy_version: int  # version of the current weights; 0 for weights from disk

    def add(self, request: SamplingRequest) -> None:
        """Queue a request. Raises ``ValueError`` for an invalid one, such as a prompt too long."""

    def step(self) -> list[SamplingResult]:
        """Advance every request and return the results of those that finished."""
        ...

    def has_work(self) -> bool:
        """Return True if any request is unfinished."""
        ...

    def abort(self, request_ids: Iterable[str]) -> None:
        """Discard requests, which then give no results. Unknown ids are ignored."""

    def update_weights(self, weights: Weights, version: int) -> None:
        """Replace all weights and clear the prefix cache.

        ``weights`` are arrays or tensors with the names of the Hugging Face checkpoint. Raises
        ``EngineError`` while requests are unfinished.
        """

    def held_weights(self) -> "Mapping[str, torch.Tensor]":
        """Return the current weights of the engine by their Hugging Face names.

        Weights that cannot be read may be missing, and other tensors included. The weights of a
        user-provided engine without this method are not verified after updates.
        """
        ...

    def sleep(self, level: SleepLevel = 1) -> None:
        """Free accelerator memory until ``wake``. No effect on CPU.

        Level 1 keeps the weights in host memory. Level 2 discards them: after ``wake`` new weights
        must be loaded before any request.
        """

    def wake(self, part: EnginePart | None = None) -> None:
        """Allocate accelerator memory again for ``weights`` or ``kv_cache`` (None: both)."""

    def close(self) -> None:
        """Free all memory and processes of the engine."""


class DirectSyncEngine(RolloutEngine, Protocol):
    """Engine that receives weights directly from the devices of the training ranks.

    The methods are called in the order ``connect`` (once), then ``begin_update``, ``receive`` (once
    per chunk) and ``finish_update`` for each update. The content of their argument ``info`` depends
    on the transport (``verl.workers.weight_transfer``).
    """

    def connect(self, info: Mapping[str, object]) -> None:
        """Prepare to receive weights, for example join a NCCL group."""

    def begin_update(self) -> None:
        """Prepare to receive new weights. Raises ``EngineError`` while requests are unfinished."""

    def receive(self, info: Mapping[str, object]) -> None:
        """Load one chunk of weights, described by ``info``."""

    def finish_update(self, version: int) -> dict[str, int]:
        """Complete the update, clear the prefix cache and return the weights' checksums by name.

        Raises ``EngineError`` if the engine does not hold the received weights.
        """
        ...


class AdapterEngine(RolloutEngine, Protocol):
    """Engine that also holds LoRA adapters. Each request names one adapter or none."""

    def load_adapter(
        self, name: str, weights: Weights, version: int | None = None
    ) -> dict[str, int]:
        """Replace the adapter ``name``, clear the prefix cache, and return checksums by tensor.

        ``weights`` are the tensors ``lora_A`` and ``lora_B`` of each module, with the scale
        multiplied into ``lora_B``. ``version`` is that of the policy (None for adapters that are
        not trained). Raises ``EngineError`` while requests are unfinished, and if the engine does
        not hold the adapter afterwards.
        """
        ...


class StopStringTokenizer(Protocol):
    """Methods of a tokenizer that are needed to find stop strings in sampled tokens."""

    def encode(self, text: str, /, *, add_special_tokens: bool) -> list[int]: ...

    def decode(
        self,
        token_ids: list[int],
        /,
        *,
        skip_special_tokens: bool = ...,
        clean_up_tokenization_spaces: bool = ...,
    ) -> str | list[str]: ...


@dataclass(frozen=True, slots=True)
class StopConditions:
    """Stop conditions of a request: single tokens, and strings in the decoded text."""

    token_ids: frozenset[int]  # end-of-turn tokens, and stop strings of one token
    stop_strings: tuple[str, ...]  # stop strings of several tokens


class StopConditionFactory:
    """Factory of the ``StopConditions`` of requests. The tokens ``end_ids`` stop every request."""

    def __init__(self, tokenizer: StopStringTokenizer, end_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._end_ids = frozenset(end_ids)
        self._conditions_of_strings: dict[tuple[str, ...], StopConditions] = {}

    def get_conditions(self, stop: tuple[str, ...]) -> StopConditions:
        """Return the stop conditions of a request with the stop strings ``stop``.

        Raises ``ValueError`` for an empty stop string.
        """
        if stop in self._conditions_of_strings:
            return self._conditions_of_strings[stop]
        if "" in stop:
            raise ValueError("a stop string is empty; allowed: strings of at least one character")
        stop_token_ids = set(self._end_ids)
        stop_strings: list[str] = []
        for text in stop:
            string_token_ids = self._tokenizer.encode(text, add_special_tokens=False)
            # Compare the decoded token, because it may include a space before the text.
            if len(string_token_ids) == 1 and self._tokenizer.decode(string_token_ids) == text:
                stop_token_ids.add(string_token_ids[0])
            else:
                stop_strings.append(text)
        self._conditions_of_strings[stop] = StopConditions(
            frozenset(stop_token_ids), tuple(stop_strings)
        )
        return self._conditions_of_strings[stop]

    def completes_stop_string(self, stop_conditions: StopConditions, token_ids: list[int]) -> bool:
        """Return True if the last of ``token_ids`` completes one of the stop strings."""
        if not stop_conditions.stop_strings:
            return False
        # A token has at least one byte. So a stop string of N bytes is within the last N tokens.
        # One more token is needed, because decoding may drop a space at the start.
        num_tokens = max(len(text.encode("utf-8")) for text in stop_conditions.stop_strings) + 1
        decoded_tail = self._tokenizer.decode(
            token_ids[-num_tokens:], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return any(text in decoded_tail for text in stop_conditions.stop_strings)


def derive_counter_seeds(seeds: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """Derive uint64 seeds [N] from request seeds [N] and token counters [N].

    The counter is the index of the sampled token in its request. Applies the finaliser of
    SplitMix64 twice. The result does not depend on the batch, chunked prefill or preemption.
    """
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is intended
        mixed_seeds = _mix_bits(seeds.astype(np.uint64) + _GOLDEN_RATIO_INCREMENT)
        return _mix_bits(
            mixed_seeds + _GOLDEN_RATIO_INCREMENT * (counters.astype(np.uint64) + np.uint64(1))
        )


def _mix_bits(bits: np.ndarray) -> np.ndarray:
    bits = (bits ^ (bits >> np.uint64(30))) * _FIRST_FACTOR
    bits = (bits ^ (bits >> np.uint64(27))) * _SECOND_FACTOR
    return bits ^ (bits >> np.uint64(31))


class RequestSeeds:
    """Source of 63-bit seeds for requests, derived from the engine's seed if a request has none."""

    def __init__(self, engine_seed: int) -> None:
        self._engine_seed = np.array([engine_seed & _MASK_63_BITS], dtype=np.uint64)
        self._num_derived_seeds = 0

    def get_seed(self, request: SamplingRequest) -> int:
        if request.seed is not None:
            return request.seed & _MASK_63_BITS
        self._num_derived_seeds += 1
        return (
            int(derive_counter_seeds(self._engine_seed, np.array([self._num_derived_seeds]))[0])
            >> 1
        )


def check_request(
    request: SamplingRequest, max_model_len: int, vocab_size: int, adapter_names: Iterable[str] = ()
) -> None:
    """Raise ``ValueError`` for a request that an engine with these adapters cannot serve."""
    other_model_names = (
        sorted({*adapter_names, BASE_MODEL} - {POLICY_MODEL}) if adapter_names else []
    )
    if request.model not in (POLICY_MODEL, *other_model_names):
        raise ValueError(
            f"model={request.model!r} is not in the engine; allowed: "
            f"{', '.join([POLICY_MODEL, *other_model_names])}; "
            "fix: name the adapter in actor_rollout_ref.model.adapters"
        )
    prompt_length = len(request.prompt_ids)
    if prompt_length == 0:
        raise ValueError("the prompt is empty")
    if request.max_tokens < 1:
        raise ValueError(f"max_tokens={request.max_tokens}; allowed: at least 1")
    if prompt_length >= max_model_len:
        raise ValueError(
            f"the prompt of {prompt_length} tokens fills the context of {max_model_len} tokens; "
            "fix: raise actor_rollout_ref.rollout.max_model_len or shorten the prompt"
        )
    if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= vocab_size:
        raise ValueError(f"a prompt token is outside the vocabulary of {vocab_size} tokens")
