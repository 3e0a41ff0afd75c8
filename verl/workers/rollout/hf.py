"""Rollout engine without vLLM: a transformers model decodes one left-padded batch.

The KV cache of two rows with tokens a and b (``.`` is padding)::

    row 0   . . . a a a a a
    row 1   . b b b b b b b

Rows are left-padded to the widest row. When rows finish, columns with only padding are removed. New
rows are prefilled together and added to the batch. This copies the whole cache. For a small policy
the copy takes more time than decoding. Therefore new rows wait a few steps, so that several are
added at once.

Layers with a recurrent state (linear attention, state spaces, convolutions) keep one state per row.
The models set the inputs of padding to zero, which leaves these states unchanged.

Models with another kind of cache compute all tokens of their rows again in each step. Their rows
are right-padded, as in the row-wise passes of the trainer.
"""

import inspect
import logging
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from verl.config.schema.actor_rollout_ref import RolloutConfig
from verl.config.schema.model import ModelConfig
from verl.models.adapters import list_adapter_shapes
from verl.models.backbone import find_length_dependent_rope
from verl.models.checkpoint_format import convert_to_checkpoint, plan_conversions
from verl.models.forward_kind import plan_passes
from verl.models.loader import read_config
from verl.models.lora import drop_lora
from verl.models.token_scores import compute_float32_logits
from verl.models.weights import disable_weight_rescaling, load_weights
from verl.utils.chat_template import find_stop_token_ids
from verl.utils.sampling import SamplingRequest, SamplingResult, StopReason
from verl.utils.weight_arrays import as_tensor
from verl.workers.rollout.base import (
    AdapterEngine,
    EngineError,
    EnginePart,
    RequestSeeds,
    SleepLevel,
    StopConditionFactory,
    StopConditions,
    StopStringTokenizer,
    Weights,
    check_request,
)
from verl.workers.rollout.hf_adapters import HFAdapters
from verl.workers.rollout.token_sampling import derive_uniform_numbers, sample_tokens
from verl.workers.rollout.weight_receipt import verify_adapter

logger = logging.getLogger(__name__)

# Waiting rows join the batch if their number is at least ``_MIN_JOIN_FRACTION`` times that of the
# running rows, or if they have waited ``_MAX_JOIN_WAIT_STEPS`` steps.
_MIN_JOIN_FRACTION = 1 / 4
_MAX_JOIN_WAIT_STEPS = 4

# Model types that keep their states in a cache class of the model, or in its modules.
_MODELS_WITH_OTHER_CACHE = {"minimax", "recurrent_gemma"}


@dataclass(slots=True)
class _Row:
    """Request that is waiting or running, with the tokens sampled so far."""

    request: SamplingRequest
    stop_conditions: StopConditions
    seed: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _KVCache:
    """KV cache of the running rows. It holds all tokens of a row except the last one.

    ``mask`` [B, L] int64 is 1 for tokens and 0 for padding. ``cache`` is None for a model whose
    tokens are all computed again in each step.
    """

    cache: DynamicCache | None
    mask: torch.Tensor

    def select_rows(self, row_indices: list[int], first_column: int = 0) -> None:
        """Keep the rows ``row_indices``, possibly several times, and columns ``first_column:``."""
        indices = torch.tensor(row_indices, device=self.mask.device)
        self.mask = self.mask[:, first_column:].index_select(0, indices)
        for layer in _list_kv_cache_layers(self.cache):
            if layer.keys is not None and layer.values is not None:
                layer.keys = layer.keys[:, :, first_column:].index_select(0, indices)
                layer.values = layer.values[:, :, first_column:].index_select(0, indices)
        for states in _iterate_recurrent_states(self.cache):
            for state_index, state in states.items():
                states[state_index] = state.index_select(0, indices)


class HFEngine(AdapterEngine):
    """Rollout engine on transformers. A step samples one token per request."""

    gives_logprobs = True

    def __init__(
        self,
        config: RolloutConfig,
        model_path: str,
        seed: int = 0,
        num_threads: int | None = None,
        trust_remote_code: bool = False,
        lora: ModelConfig | None = None,
    ) -> None:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        dtype = getattr(torch, config.dtype)
        model: PreTrainedModel = load_weights(
            model_path,
            config=read_config(model_path, trust_remote_code),
            dtype=dtype,
            trust_remote_code=trust_remote_code,
        )
        disable_weight_rescaling(model.config)
        _move_model(model, "cuda" if torch.cuda.is_available() else "cpu")
        output_head = model.get_output_embeddings()
        if model.dtype != torch.float32 and isinstance(output_head, torch.nn.Linear):
            # Compute logits in float32 as the trainer does. nn.Module calls the ``forward`` of the
            # instance.
            output_head.forward = partial(compute_float32_logits, output_head)  # pyright: ignore[reportAttributeAccessIssue]
        adapters = None if lora is None else HFAdapters(model, list_adapter_shapes(lora, model))
        model.eval().requires_grad_(False)
        tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code)
        stop_condition_factory = StopConditionFactory(
            tokenizer, find_stop_token_ids(tokenizer, model_path)
        )
        self._initialise(
            model, stop_condition_factory, seed, config.max_num_seqs, config.max_model_len, adapters
        )

    @classmethod
    def wrap_model(
        cls,
        model: PreTrainedModel,
        tokenizer: StopStringTokenizer,
        end_ids: Iterable[int],
        *,
        seed: int = 0,
        max_num_seqs: int = 128,
    ) -> "HFEngine":
        """Create an engine on a model that the caller may train.

        ``end_ids`` are the tokens that end a turn.
        """
        engine = cls.__new__(cls)
        engine._initialise(
            model, StopConditionFactory(tokenizer, end_ids), seed, max_num_seqs, None
        )
        return engine

    def _initialise(
        self,
        model: PreTrainedModel,
        stop_condition_factory: StopConditionFactory,
        seed: int,
        max_num_seqs: int,
        max_model_len: int | None,
        adapters: HFAdapters | None = None,
    ) -> None:
        self._adapters = adapters
        self._model_or_none: PreTrainedModel | None = model
        self._stop_condition_factory = stop_condition_factory
        self._seeds = RequestSeeds(seed)
        self._device = model.device
        if note := describe_missing_cache(model):
            _warn_about_missing_cache(note)
        text_config = model.config.get_text_config()
        self._vocab_size: int = text_config.vocab_size
        # Models without position embeddings, such as state spaces, have no limit.
        self._max_model_len: int = max_model_len or getattr(
            text_config, "max_position_embeddings", sys.maxsize
        )
        self._max_num_seqs = max_num_seqs
        self._waiting_rows: deque[_Row] = deque()
        self._steps_waited = 0  # steps since the first waiting row was queued
        self._running_rows: list[_Row] = []
        self._kv_cache: _KVCache | None = None  # None if no row runs
        # Shapes of the weights that ``sleep`` has discarded.
        self._discarded_shapes: dict[str, torch.Size] = {}
        self.policy_version = 0

    @property
    def _loaded_model(self) -> PreTrainedModel:
        if self._model_or_none is None:
            raise EngineError("the engine is closed")
        return self._model_or_none

    def add(self, request: SamplingRequest) -> None:
        adapter_names = self._adapters.names if self._adapters else ()
        check_request(request, self._max_model_len, self._vocab_size, adapter_names)
        row_stop_conditions = self._stop_condition_factory.get_conditions(tuple(request.stop))
        self._waiting_rows.append(_Row(request, row_stop_conditions, self._seeds.get_seed(request)))

    def has_work(self) -> bool:
        return bool(self._waiting_rows or self._running_rows)

    def step(self) -> list[SamplingResult]:
        """Sample one token for every running or joining request and return finished results."""
        # no_grad instead of inference_mode, because autograd refuses tensors made in
        # inference_mode, and the caller may also train the model.
        with torch.no_grad():
            logits = [self._decode_running_rows()] if self._running_rows else []
            if joining_rows := self._pop_rows_to_admit():
                logits.append(self._prefill_rows(joining_rows))
            if not logits:
                return []
            self._sample_next_tokens(torch.cat(logits))
            return self._remove_finished()

    def _remove_finished(self) -> list[SamplingResult]:
        """Remove the rows that are finished by their newest token and return their results."""
        results: list[SamplingResult] = []
        unfinished_indices: list[int] = []
        for index, row in enumerate(self._running_rows):
            stop_reason = self._find_stop_reason(row)
            if stop_reason is None:
                unfinished_indices.append(index)
            else:
                results.append(
                    SamplingResult(
                        row.request.request_id,
                        row.token_ids,
                        row.logprobs,
                        stop_reason,
                        self.policy_version,
                    )
                )
        if results:
            self._keep_rows(unfinished_indices)
        return results

    def abort(self, request_ids: Iterable[str]) -> None:
        aborted_ids = set(request_ids)

        def is_kept(row: _Row) -> bool:
            return row.request.request_id not in aborted_ids

        self._waiting_rows = deque(filter(is_kept, self._waiting_rows))
        kept_indices = [index for index, row in enumerate(self._running_rows) if is_kept(row)]
        if len(kept_indices) < len(self._running_rows):
            self._keep_rows(kept_indices)

    def update_weights(self, weights: Weights, version: int) -> None:
        """Copy full weights into the model.

        Raises ``EngineError`` for unknown or missing names, and while requests are unfinished.
        """
        self._refuse_while_running()
        parameters = self._get_parameters()
        # The key is the memory address, because tied parameters are one weight with several names.
        missing_names = {parameter.data_ptr(): name for name, parameter in parameters.items()}
        with torch.no_grad():
            for name, tensor in self._convert_from_checkpoint(dict(weights)):
                if name not in parameters:
                    raise EngineError(f"the model has no parameter '{name}'")
                parameters[name].copy_(tensor)
                missing_names.pop(parameters[name].data_ptr(), None)
        if missing_names:
            raise EngineError(f"no new weights for {', '.join(sorted(missing_names.values())[:5])}")
        self.policy_version = version

    def _convert_from_checkpoint(
        self, weights: dict[str, np.ndarray | torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        model = self._loaded_model
        for conversion in plan_conversions(model, weights.keys(), to_checkpoint=False):
            conversion_inputs = {name: as_tensor(weights[name]) for name in conversion.patterns}
            yield from conversion.convert(model, conversion_inputs).items()

    def held_weights(self) -> dict[str, torch.Tensor]:
        """Return parameters and persistent buffers without adapters, named as in the checkpoint."""
        return convert_to_checkpoint(self._loaded_model, self._get_parameters())

    def _get_parameters(self) -> dict[str, torch.Tensor]:
        return drop_lora(self._loaded_model.state_dict())

    def load_adapter(
        self, name: str, weights: Weights, version: int | None = None
    ) -> dict[str, int]:
        self._refuse_while_running()
        if self._adapters is None:
            raise EngineError("the engine was started without LoRA adapters")
        adapter = {tensor_name: as_tensor(value) for tensor_name, value in weights}
        self.policy_version = self.policy_version if version is None else version
        return verify_adapter(adapter, self._adapters.replace_adapter(name, adapter))

    def _refuse_while_running(self) -> None:
        if self.has_work():
            num_requests = len(self._running_rows) + len(self._waiting_rows)
            raise EngineError(f"weights cannot change while {num_requests} requests are unfinished")

    def sleep(self, level: SleepLevel = 1) -> None:
        if self._device.type == "cpu":
            return
        if level == 2:
            for name, parameter in self._loaded_model.named_parameters():
                self._discarded_shapes[name] = parameter.shape
                parameter.data = parameter.new_empty(0)
        _move_model(self._loaded_model, "cpu")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # otherwise this process would keep the freed memory

    def wake(self, part: EnginePart | None = None) -> None:
        if part == "kv_cache":  # the cache exists only while rows run
            return
        _move_model(self._loaded_model, self._device)
        for name, shape in self._discarded_shapes.items():
            parameter = self._loaded_model.get_parameter(name)
            parameter.data = parameter.new_empty(shape)
        self._discarded_shapes = {}

    def close(self) -> None:
        self._model_or_none = None
        self._kv_cache = None
        self._running_rows = []
        self._waiting_rows = deque()

    def _pop_rows_to_admit(self) -> list[_Row]:
        """Remove and return the waiting rows that join the batch in this step.

        Either no row joins, so that more rows join together in a later step, or as many rows join
        as ``max_num_seqs`` allows.
        """
        num_joining_rows = min(
            len(self._waiting_rows), self._max_num_seqs - len(self._running_rows)
        )
        if (
            num_joining_rows < len(self._running_rows) * _MIN_JOIN_FRACTION
            and self._steps_waited < _MAX_JOIN_WAIT_STEPS
        ):
            self._steps_waited += bool(num_joining_rows)
            return []
        self._steps_waited = 0
        return [self._waiting_rows.popleft() for _ in range(num_joining_rows)]

    def _decode_running_rows(self) -> torch.Tensor:
        """Return the logits [B, V] after the last token of each running row.

        The last tokens are added to the cache.
        """
        kv_cache = self._kv_cache
        assert kv_cache is not None  # rows are running
        last_tokens = torch.tensor(
            [[row.token_ids[-1]] for row in self._running_rows], device=self._device
        )
        kv_cache.mask = torch.cat([kv_cache.mask, torch.ones_like(last_tokens)], dim=1)
        return self._run_model(self._running_rows, last_tokens, kv_cache)

    def _prefill_rows(self, rows: list[_Row]) -> torch.Tensor:
        """Add ``rows`` to the batch and return the logits [N, V] after their prompts."""
        prefill_keys = [(row.request.model, *row.request.prompt_ids) for row in rows]
        distinct_rows = dict(zip(prefill_keys, rows, strict=True))  # one row per key
        prompts = [torch.tensor(row.request.prompt_ids) for row in distinct_rows.values()]
        masks = [torch.ones_like(prompt) for prompt in prompts]
        # Left padding, so that the next token of every row has the same column.
        ids, mask = (
            pad_sequence(tensors, batch_first=True, padding_side="left").to(self._device)
            for tensors in (prompts, masks)
        )
        kv_cache = _KVCache(_make_cache(self._loaded_model), mask)
        logits = self._run_model(list(distinct_rows.values()), ids, kv_cache)
        if len(distinct_rows) < len(rows):
            index_of_key = {key: index for index, key in enumerate(distinct_rows)}
            row_indices = [index_of_key[key] for key in prefill_keys]
            logits = logits.index_select(0, torch.tensor(row_indices, device=self._device))
            kv_cache.select_rows(row_indices)
        self._append_rows(rows, kv_cache)
        return logits

    def _run_model(self, rows: list[_Row], ids: torch.Tensor, kv_cache: _KVCache) -> torch.Tensor:
        """Run the model on the tokens ``ids`` [B, N] and return the logits [B, V] after them.

        ``ids`` continue the tokens in ``kv_cache``, and their keys and values are added to it.
        ``kv_cache.mask`` already includes ``ids``. Without a cache, all tokens of ``rows`` are
        computed instead. Row b uses the LoRA adapter that the request of ``rows[b]`` names.
        """
        if kv_cache.cache is None:
            return self._run_model_without_cache(rows)
        # Padding gets position 0. It is masked, so its position has no effect.
        positions = (kv_cache.mask.cumsum(dim=1) - 1).clamp_(min=0)
        logits = self._compute_logits(
            rows,
            input_ids=ids,
            attention_mask=kv_cache.mask,
            position_ids=positions[:, -ids.shape[1] :],
            past_key_values=kv_cache.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return logits[:, -1].float()

    def _run_model_without_cache(self, rows: list[_Row]) -> torch.Tensor:
        """Compute all tokens of ``rows`` and return the logits [B, V] after the last ones.

        Right padding needs no mask: in a causal model no token depends on later ones.
        """
        sequences = [torch.tensor([*row.request.prompt_ids, *row.token_ids]) for row in rows]
        lengths = [len(sequence) for sequence in sequences]
        # Padding makes a pass longer, and some rotary embeddings depend on the length of the pass.
        can_pad_rows = not find_length_dependent_rope(self._loaded_model.config)
        last_logits: dict[int, torch.Tensor] = {}
        for indices in plan_passes(lengths, can_pad_rows):
            ids = pad_sequence([sequences[index] for index in indices], batch_first=True)
            width = ids.shape[1]
            logits = self._compute_logits(
                [rows[index] for index in indices],
                input_ids=ids.to(self._device),
                use_cache=False,
                logits_to_keep=width - lengths[indices[-1]] + 1,  # indices[-1] is the shortest row
            )
            for index, row_logits in zip(indices, logits, strict=True):
                last_logits[index] = row_logits[lengths[index] - 1 - width].float()
        return torch.stack([last_logits[index] for index in range(len(rows))])

    def _compute_logits(self, rows: list[_Row], **inputs: Any) -> torch.Tensor:
        """Return the model's logits. Row b uses the LoRA adapter that ``rows[b]`` names."""
        if self._adapters is not None:
            self._adapters.set_row_adapters([row.request.model for row in rows])
        return self._loaded_model(**inputs).logits

    def _append_rows(self, rows: list[_Row], new_cache: _KVCache) -> None:
        """Append ``rows`` and their cache to the running rows, with equal widths by padding."""
        self._running_rows = self._running_rows + rows
        old_cache = self._kv_cache
        if old_cache is None:
            self._kv_cache = new_cache
            return
        width = max(old_cache.mask.shape[1], new_cache.mask.shape[1])
        old_padding = width - old_cache.mask.shape[1]
        new_padding = width - new_cache.mask.shape[1]

        def concat(old: torch.Tensor | None, new: torch.Tensor | None) -> torch.Tensor:
            """Left-pad keys or values [B, H, L, D] of both caches and concatenate them along B."""
            assert old is not None and new is not None  # set by the first forward of each batch
            padded_old = pad(old, (0, 0, old_padding, 0))
            return torch.cat([padded_old, pad(new, (0, 0, new_padding, 0))])

        old_cache.mask = torch.cat(
            [pad(old_cache.mask, (old_padding, 0)), pad(new_cache.mask, (new_padding, 0))]
        )
        old_layers, new_layers = map(_list_kv_cache_layers, (old_cache.cache, new_cache.cache))
        for layer, new_layer in zip(old_layers, new_layers, strict=True):
            if layer.keys is not None:
                layer.keys = concat(layer.keys, new_layer.keys)
                layer.values = concat(layer.values, new_layer.values)
        old_states, new_states = map(_iterate_recurrent_states, (old_cache.cache, new_cache.cache))
        for states, added_states in zip(old_states, new_states, strict=True):
            for state_index, state in states.items():
                states[state_index] = torch.cat([state, added_states[state_index]])

    def _keep_rows(self, kept_indices: list[int]) -> None:
        """Keep only the rows ``kept_indices``, and remove columns that then hold only padding."""
        self._running_rows = [self._running_rows[index] for index in kept_indices]
        kv_cache = self._kv_cache
        if not kept_indices or kv_cache is None:
            self._kv_cache = None
            return
        # If the longest row was removed, the first columns hold only padding.
        first_column = int(kv_cache.mask[kept_indices].any(dim=0).int().argmax())
        kv_cache.select_rows(kept_indices, first_column)

    def _sample_next_tokens(self, logits: torch.Tensor) -> None:
        """Sample one token for each row from ``logits`` [B, V], and append it and its log-prob."""
        requests = [row.request for row in self._running_rows]
        temperature, top_p, top_k = (
            torch.tensor([getattr(request, name) for request in requests], device=self._device)
            for name in ("temperature", "top_p", "top_k")
        )
        random_numbers = derive_uniform_numbers(
            np.array([row.seed for row in self._running_rows], dtype=np.uint64),
            np.array([len(row.token_ids) for row in self._running_rows]),
        )
        # Truncation sorts the whole vocabulary, so it is done only if a request needs it.
        applied_top_k = top_k if bool((top_k > 0).any()) else None
        applied_top_p = top_p if bool((top_p < 1).any()) else None
        tokens, logprobs = sample_tokens(
            logits, temperature, applied_top_k, applied_top_p, random_numbers
        )
        for row, token, logprob in zip(
            self._running_rows, tokens.tolist(), logprobs.tolist(), strict=True
        ):
            row.token_ids.append(token)
            row.logprobs.append(logprob)

    def _find_stop_reason(self, row: _Row) -> StopReason | None:
        ids = row.token_ids
        conditions = row.stop_conditions
        is_end_token = ids[-1] in conditions.token_ids
        if is_end_token or self._stop_condition_factory.completes_stop_string(conditions, ids):
            return StopReason.STOP
        is_row_full = len(row.request.prompt_ids) + len(ids) >= self._max_model_len
        return StopReason.LENGTH if is_row_full or len(ids) >= row.request.max_tokens else None


def _move_model(model: torch.nn.Module, device: str | torch.device) -> None:
    model.to(device)  # a function, because type checkers refuse calls of ``PreTrainedModel.to``


@lru_cache
def _warn_about_missing_cache(note: str) -> None:
    """Log ``note`` once per process."""
    fix = "fix: set actor_rollout_ref.rollout.name=vllm if vLLM serves this model"
    logger.warning("%s, which is slow; %s", note, fix)


def describe_missing_cache(model: PreTrainedModel) -> str:
    """Return a sentence on the effect if the engine has no cache for ``model``, else ""."""
    if _make_cache(model) is not None:
        return ""
    return (
        f"rollout.name=hf has no cache for {model.config.model_type}: it computes all tokens of a "
        "row again for each sampled token"
    )


def _make_cache(model: PreTrainedModel) -> DynamicCache | None:
    """Return an empty cache for ``model``; None if it needs another kind of cache.

    Attention layers with a window also keep all keys and values, because the model's mask applies
    the window. So the caches of all attention layers have equal widths.
    """
    accepts_cache = "past_key_values" in inspect.signature(model.forward).parameters
    if not accepts_cache or model.config.model_type in _MODELS_WITH_OTHER_CACHE:
        return None
    cache = DynamicCache(config=model.config)
    layer_types = {type(layer) for layer in cache.layers}
    if layer_types <= {DynamicLayer, DynamicSlidingWindowLayer}:
        return DynamicCache()
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicSlidingWindowLayer:
            cache.layers[index] = DynamicLayer()
    layer_types = {type(layer) for layer in cache.layers}
    supported_types = {DynamicLayer, LinearAttentionLayer, LinearAttentionAndFullAttentionLayer}
    return cache if layer_types <= supported_types else None


def _list_kv_cache_layers(cache: DynamicCache | None) -> list[CacheLayerMixin]:
    """Return the layers of ``cache`` with keys and values."""
    layers = cache.layers if cache is not None else []
    return [layer for layer in layers if isinstance(layer, CacheLayerMixin)]


def _iterate_recurrent_states(cache: DynamicCache | None) -> Iterator[dict[int, torch.Tensor]]:
    """Yield the states of each recurrent layer, with one entry per row in dimension 0."""
    for layer in cache.layers if cache is not None else []:
        if not isinstance(layer, LinearAttentionLayer):
            continue
        for states in (layer.conv_states, layer.recurrent_states):
            # A layer may lack convolution states or recurrent states. The missing ones are None.
            if all(state is not None for state in states.values()):
                yield states  # pyright: ignore[reportReturnType]
