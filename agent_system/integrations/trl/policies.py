"""Samplers of turns from the policy that TRL trains, and vLLM colocated with TRL on a CPU.

The samplers have the method ``generate`` that ``DirectOutputAgent`` calls.
"""

import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from agent_system.tokens.bridge import TextTokenizer
from verl.utils.sampling import SamplingRequest
from verl.utils.seeds import derive_seed
from verl.workers.rollout.base import StopStringTokenizer
from verl.workers.rollout.hf import HFEngine
from verl.workers.rollout.vllm_cpu import patch_model_inspection, repack_output_head

MAX_SEQUENCES = 128  # maximum number of turns that ``TrainedModelSampler`` samples at once
CPU_KV_CACHE_GIB = "1"  # GiB of vLLM's key-value cache, as value of an environment variable


@dataclass(frozen=True, slots=True)
class TurnSampling:
    """Sampling settings of a turn. ``top_k`` 0 and ``top_p`` 1.0 mean no truncation."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """One sampled turn: ids and one log-prob per id. ``finish_reason``: ``stop`` or ``length``."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class PolicyOutput:
    """Result for one prompt, with the fields of vLLM's ``RequestOutput``."""

    outputs: tuple[SampledTurn]


class SamplerTokenizer(TextTokenizer, StopStringTokenizer, Protocol):
    """Tokenizer that encodes prompts and has the methods that stop strings need."""


class TrainedModelSampler:
    """Sampler that uses the model that is being trained, not a copy of it.

    ``borrow_model()`` is a context manager that yields the model. Samples depend on ``seed`` and on
    the number of earlier calls of ``generate``.
    """

    def __init__(
        self,
        borrow_model: Callable[[], AbstractContextManager[Any]],
        tokenizer: SamplerTokenizer,
        end_token_ids: Iterable[int],
        seed: int,
    ) -> None:
        self.tokenizer = tokenizer
        self._borrow_model = borrow_model
        self._end_token_ids = frozenset(end_token_ids)
        self._seed = seed
        self._call_numbers = itertools.count()

    def generate(self, prompts: Sequence[Any], sampling_params: TurnSampling) -> list[PolicyOutput]:
        """Sample one turn per prompt, ``{"prompt_token_ids": [...]}`` or text, in order."""
        seed = derive_seed("turns of a live policy", self._seed, next(self._call_numbers))
        with self._borrow_model() as model:
            engine = HFEngine.wrap_model(
                model, self.tokenizer, self._end_token_ids, seed=seed, max_num_seqs=MAX_SEQUENCES
            )
            for number, prompt in enumerate(prompts):
                if isinstance(prompt, Mapping):
                    ids = prompt["prompt_token_ids"]
                else:
                    ids = self.tokenizer(prompt)["input_ids"]
                request = SamplingRequest(
                    str(number),
                    list(ids),
                    sampling_params.max_tokens,
                    temperature=sampling_params.temperature,
                    top_p=sampling_params.top_p,
                    # TRL switches top-k sampling off with 0, the engine with -1.
                    top_k=sampling_params.top_k or -1,
                    stop=sampling_params.stop,
                )
                engine.add(request)
            results = {}
            while engine.has_work():
                results |= {int(result.request_id): result for result in engine.step()}
        turns = [results[number] for number in range(len(prompts))]
        return [
            PolicyOutput((SampledTurn(turn.token_ids, turn.logprobs, turn.stop_reason.value),))
            for turn in turns
        ]


class VllmServerSampler:
    """Sampler that calls TRL's client of a vLLM server (``vllm_mode="server"``)."""

    def __init__(self, client: Any, tokenizer: TextTokenizer, end_token_ids: Iterable[int]) -> None:
        self.client, self.tokenizer, self._end_token_ids = (
            client,
            tokenizer,
            frozenset(end_token_ids),
        )

    def generate(self, prompts: Sequence[Any], sampling_params: TurnSampling) -> list[PolicyOutput]:
        """Sample one turn per prompt, in order."""
        response = self.client.generate(
            prompts=[list(prompt["prompt_token_ids"]) for prompt in prompts],
            n=1,
            temperature=sampling_params.temperature,
            top_p=sampling_params.top_p,
            top_k=sampling_params.top_k,
            max_tokens=sampling_params.max_tokens,
            logprobs=0,  # only of the sampled token
            generation_kwargs={
                "stop": list(sampling_params.stop),
                "stop_token_ids": sorted(self._end_token_ids),
                "include_stop_str_in_output": True,
            },
        )
        results: list[PolicyOutput] = []
        for token_ids, logprob_entries in zip(
            response["completion_ids"], response["logprobs"], strict=True
        ):
            ids, logprobs = list(token_ids), [entry[0] for entry in logprob_entries]
            # The client does not return the finish reason.
            has_ended = bool(ids) and (
                ids[-1] in self._end_token_ids
                or self.tokenizer.decode(ids).endswith(sampling_params.stop or ("\0",))
            )
            reason = "stop" if has_ended or len(ids) < sampling_params.max_tokens else "length"
            results.append(PolicyOutput((SampledTurn(ids, logprobs, reason),)))
        return results


def prepare_vllm_on_cpu() -> None:
    """Prepare vLLM on CPU: set its environment variables unless the user has set them.

    Call this before vLLM is imported.
    """
    # Keep the engine in this process, so that the weight sync can access its modules.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", CPU_KV_CACHE_GIB)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    patch_model_inspection()


def make_cpu_weight_sync(vllm_generation: Any) -> Callable[[], None]:
    """Return a replacement for ``sync_weights`` of TRL's ``VLLMGeneration`` (``colocate`` mode).

    TRL loads tensors into vLLM's modules one by one. This fails on CPU, where vLLM has repacked
    them. The replacement calls vLLM's ``reload_weights``, repacks the output head and resets the
    prefix cache.
    """

    def sync_weights() -> None:
        named_parameters = vllm_generation._iter_named_params()
        weights = [(name, tensor.detach().clone()) for name, tensor in named_parameters]
        vllm_generation.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        repack_output_head(
            vllm_generation.llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
        )
        if not vllm_generation.llm.reset_prefix_cache():
            raise RuntimeError(
                "vLLM did not reset its prefix cache after a weight update: "
                "cached keys would be those of the old weights"
            )

    return sync_weights
