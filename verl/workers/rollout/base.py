"""What a rollout engine is, and the pieces all engines share: stop rules, counter seeds, request
checks.

Nothing heavy is imported here: an engine sets its environment variables before it loads torch or
vLLM.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

import numpy as np

from verl.utils.end_tokens import find_end_ids
from verl.utils.sampling import SamplingRequest, SamplingResult

if TYPE_CHECKING:
    import torch

GREEDY_BELOW = 1e-5  # temperatures below this mean argmax
# SplitMix64: its increment (2**64 over the golden ratio) and the factors of its finaliser
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = np.uint64(0x94D049BB133111EB)
_63_BITS = 0x7FFFFFFFFFFFFFFF  # seeds have to fit the signed integers of torch and vLLM

Weights: TypeAlias = "Iterable[tuple[str, np.ndarray | torch.Tensor]]"
SleepLevel: TypeAlias = Literal[1, 2]
EnginePart: TypeAlias = Literal["weights", "kv_cache"]


class EngineError(RuntimeError):
    """An engine, or the worker around it, cannot do what was asked; the message says why."""


class RolloutEngine(Protocol):
    """A blocking engine with continuous batching, driven by one thread: every step moves all
    requests forward.

    Token ids go in and come out. Log-probs in results are those the token was sampled with: after
    temperature, top-k and top-p; a greedy token carries its log-prob at temperature 1. The tokens
    that complete a stop string, and an end-of-turn token, are the last of ``token_ids``. What a
    seeded request samples depends on its seed, its prompt and the weights; on the requests beside
    it only through floating-point rounding.
    """

    policy_version: int  # of the weights in the engine; 0 as loaded from disk

    @property
    def gives_logprobs(self) -> bool:
        """Whether results carry log-probs (a class attribute); an engine without is refused."""
        ...

    def add(self, request: SamplingRequest) -> None:
        """Queue a request.

        Raises ``ValueError`` for one that can never be served (prompt too long, no tokens).
        """
        ...

    def step(self) -> list[SamplingResult]:
        """Advance every request; return those that finished."""
        ...

    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        ...

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget requests; they give no result. Unknown ids are ignored."""
        ...

    def update_weights(self, weights: Weights, version: int) -> None:
        """Replace all weights (names of the Hugging Face checkpoint, arrays or tensors) and forget
        cached prefixes.

        Raises ``EngineError`` while requests are unfinished.
        """
        ...

    def held_weights(self) -> "Mapping[str, torch.Tensor]":
        """The weights as they stand in the engine, where they can be read, by the names that
        ``update_weights`` takes; others may be among them. An engine of somebody else's may lack
        this, and is believed.
        """
        ...

    def sleep(self, level: SleepLevel = 1) -> None:
        """Give accelerator memory back until ``wake``; there is none to give on CPU.

        On level 1 the weights wait in host memory. On level 2 they are forgotten: after ``wake``
        come new ones, before any request.
        """
        ...

    def wake(self, part: EnginePart | None = None) -> None:
        """Take the memory again: of one part, or of all that sleeps. Requests wait for all."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


class ReceivingEngine(RolloutEngine, Protocol):
    """An engine that fetches weights itself, from the devices of the ranks that train.

    What ``info`` holds is between the engine and the sender of its kind
    (``verl.workers.transfer``).
    """

    def connect(self, info: Mapping[str, object]) -> None:
        """Be ready for hand-overs; comes once, before all others."""
        ...

    def begin_update(self) -> None:
        """Expect new weights in pieces. Raises ``EngineError`` while requests are unfinished."""
        ...

    def receive(self, info: Mapping[str, object]) -> None:
        """Load a piece."""
        ...

    def finish_update(self, version: int) -> dict[str, int]:
        """Go on with the new weights and forget cached prefixes; the fingerprints of those that
        came, by name.

        Raises ``EngineError`` where it holds others than those that came.
        """
        ...


class StopTokenizer(Protocol):
    """What the engines need of a tokenizer."""

    @property
    def eos_token_id(self) -> object:
        """Id of the end-of-turn token, where there is one."""
        ...

    def encode(self, text: str, /, *, add_special_tokens: bool) -> list[int]:
        """Token ids of ``text``."""
        ...

    def decode(
        self,
        token_ids: list[int],
        /,
        *,
        skip_special_tokens: bool = ...,
        clean_up_tokenization_spaces: bool = ...,
    ) -> str | list[str]:
        """The text of ``token_ids``."""
        ...


@dataclass(frozen=True, slots=True)
class StopPlan:
    """How the stop strings of a request are watched for."""

    token_ids: frozenset[int]  # end-of-turn tokens, and stop strings that are one token
    strings: tuple[str, ...]  # the other stop strings, looked for in the decoded text


class StopRules:
    """Turns stop strings into a ``StopPlan``; ``end_ids`` always end a segment."""

    def __init__(self, tokenizer: StopTokenizer, end_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._end_ids = frozenset(end_ids)
        self._plans: dict[tuple[str, ...], StopPlan] = {}

    def plan(self, stop: tuple[str, ...]) -> StopPlan:
        """The plan for ``stop``; raises ``ValueError`` for an empty stop string."""
        if stop not in self._plans:
            self._plans[stop] = self._make(stop)
        return self._plans[stop]

    def _make(self, stop: tuple[str, ...]) -> StopPlan:
        if "" in stop:
            raise ValueError("a stop string is empty")
        singles = set(self._end_ids)
        strings: list[str] = []
        for text in stop:
            ids = self._tokenizer.encode(text, add_special_tokens=False)
            # one token need not be the text alone: it may carry a space that decoding shows
            if len(ids) == 1 and self._tokenizer.decode(ids) == text:
                singles.add(ids[0])
            else:
                strings.append(text)
        return StopPlan(frozenset(singles), tuple(strings))

    def completes_string(self, plan: StopPlan, token_ids: list[int]) -> bool:
        """Whether the last of ``token_ids`` completes one of the plan's strings."""
        if not plan.strings:
            return False
        # A token is at least one byte, so that this many tokens hold the longest string; one more,
        # because decoding may drop the space at the start.
        longest = max(len(text.encode("utf-8")) for text in plan.strings) + 1
        tail = self._tokenizer.decode(
            token_ids[-longest:], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return any(text in tail for text in plan.strings)


def end_token_ids(model_path: str | Path, tokenizer: StopTokenizer) -> frozenset[int]:
    """The ids that end a turn of the policy in ``model_path``; see ``verl.utils.end_tokens``."""
    return find_end_ids(tokenizer, model_path)


def counter_seeds(seeds: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """Well-mixed uint64 seeds [N] from request seeds [N] and token counters [N] (the SplitMix64
    finaliser, twice).

    Which token draws which number depends on these two alone: not on the batch, chunked prefill or
    preemption.
    """
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is what is wanted
        streams = _mix(seeds.astype(np.uint64) + _GOLDEN)
        return _mix(streams + _GOLDEN * (counters.astype(np.uint64) + np.uint64(1)))


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * _FIRST_FACTOR
    x = (x ^ (x >> np.uint64(27))) * _SECOND_FACTOR
    return x ^ (x >> np.uint64(31))


class RequestSeeds:
    """The 63-bit seed of every request: its own, or one counted on from the engine's seed."""

    def __init__(self, engine_seed: int) -> None:
        self._engine_seed = np.array([engine_seed & _63_BITS], dtype=np.uint64)
        self._drawn = 0

    def of(self, request: SamplingRequest) -> int:
        """The seed of ``request``."""
        if request.seed is not None:
            return request.seed & _63_BITS
        self._drawn += 1
        return int(counter_seeds(self._engine_seed, np.array([self._drawn]))[0]) >> 1


def check_request(request: SamplingRequest, max_model_len: int, vocab_size: int) -> None:
    """Raise ``ValueError`` for a request that no engine can serve, with the reason."""
    length = len(request.prompt_ids)
    if length == 0:
        raise ValueError("the prompt is empty")
    if request.max_tokens < 1:
        raise ValueError(f"max_tokens is {request.max_tokens}, at least 1 is needed")
    if length >= max_model_len:
        raise ValueError(
            f"the prompt has {length} tokens and leaves no room in a context of {max_model_len}; "
            "raise actor_rollout_ref.rollout.max_model_len or shorten the prompt"
        )
    if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= vocab_size:
        raise ValueError(f"a prompt token is outside the vocabulary of {vocab_size}")
