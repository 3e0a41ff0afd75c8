"""The engine that needs no vLLM: a transformers model decoded in one left-padded batch with a
shared KV cache.

    cache columns   . . . a a a a a
                    . b b b b b b b

A row is left-padded to the widest. When rows finish, columns that have become padding everywhere
are cut off; new rows are prefilled together and joined on. Joining copies the whole cache, so that
few rows wait a few steps for others: a small policy spends more on joining than on tokens.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch.nn.functional import pad
from transformers import AutoTokenizer, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from verl.config.schema.rollout import RolloutConfig
from verl.models.token_scores import full_logits
from verl.models.weights import load_weights
from verl.utils.sampling import SamplingRequest, SamplingResult, StopReason
from verl.utils.shipped import as_tensor
from verl.workers.rollout.base import (
    EngineError,
    EnginePart,
    RequestSeeds,
    SleepLevel,
    StopPlan,
    StopRules,
    StopTokenizer,
    Weights,
    check_request,
    end_token_ids,
)
from verl.workers.rollout.draw import draw, uniforms

# New rows join once they are this share of the running ones, or after this many steps.
_JOIN_SHARE = 1 / 4
_JOIN_WAIT = 4


@dataclass(slots=True)
class _Row:
    """One running request."""

    request: SamplingRequest
    plan: StopPlan
    seed: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Prefixes:
    """What the running rows have computed: all of their tokens except each row's last one.

    ``mask`` [B, L] int64 is 1 where the cache holds a real token.
    """

    cache: DynamicCache
    mask: torch.Tensor


class HFEngine:
    """``RolloutEngine`` on transformers. ``config`` is the section ``actor_rollout_ref.rollout``.

    Every step gives each running request one token; waiting requests join within a few steps,
    where ``max_num_seqs`` leaves room.
    """

    gives_logprobs = True

    def __init__(
        self,
        config: RolloutConfig,
        model_path: str,
        seed: int = 0,
        num_threads: int | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        dtype = getattr(torch, config.dtype)
        model: PreTrainedModel = load_weights(
            model_path, dtype=dtype, trust_remote_code=trust_remote_code
        )
        _move(model, "cuda" if torch.cuda.is_available() else "cpu")
        model.eval().requires_grad_(False)
        head = model.get_output_embeddings()
        if model.dtype != torch.float32 and isinstance(head, torch.nn.Linear):
            # as the trainer computes logits; set as an attribute, which a call looks up first
            head.forward = partial(full_logits, head)  # pyright: ignore[reportAttributeAccessIssue]
        tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code)
        rules = StopRules(tokenizer, end_token_ids(model_path, tokenizer))
        self._take(model, rules, seed, config.max_num_seqs, config.max_model_len)

    @classmethod
    def on_model(
        cls,
        model: PreTrainedModel,
        tokenizer: StopTokenizer,
        end_ids: Iterable[int],
        *,
        seed: int = 0,
        max_num_seqs: int = 128,
    ) -> "HFEngine":
        """An engine that samples from a model which somebody else holds, and trains; ``end_ids``
        end a segment.
        """
        engine = cls.__new__(cls)
        engine._take(model, StopRules(tokenizer, end_ids), seed, max_num_seqs, None)
        return engine

    def _take(
        self,
        model: PreTrainedModel,
        rules: StopRules,
        seed: int,
        max_num_seqs: int,
        max_model_len: int | None,
    ) -> None:
        self._held: PreTrainedModel | None = model
        self._rules = rules
        self._seeds = RequestSeeds(seed)
        self._device = model.device
        self._vocab_size: int = model.config.vocab_size
        self._max_model_len: int = max_model_len or model.config.max_position_embeddings
        self._max_num_seqs = max_num_seqs
        self._waiting: deque[_Row] = deque()
        self._waited = 0  # steps since somebody began to wait
        self._rows: list[_Row] = []
        self._prefixes: _Prefixes | None = None  # None where no row runs
        self._shapes: dict[str, torch.Size] = {}  # of weights that sleep forgot
        self.policy_version = 0

    @property
    def _model(self) -> PreTrainedModel:
        if self._held is None:
            raise EngineError("the engine is closed")
        return self._held

    def add(self, request: SamplingRequest) -> None:
        """Queue a request. Raises ``ValueError`` for one that can never be served."""
        check_request(request, self._max_model_len, self._vocab_size)
        plan = self._rules.plan(tuple(request.stop))
        self._waiting.append(_Row(request, plan, self._seeds.of(request)))

    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._waiting or self._rows)

    def step(self) -> list[SamplingResult]:
        """Sample one token for every running request and for those that join; return the finished
        ones.
        """
        # not inference_mode: a model that is also trained must not keep tensors that autograd
        # refuses
        with torch.no_grad():
            logits = [self._decode()] if self._rows else []
            if fresh := self._joining():
                logits.append(self._prefill(fresh))
            if not logits:
                return []
            self._sample(torch.cat(logits))
            return self._finished()

    def _finished(self) -> list[SamplingResult]:
        """Results of the rows that end with their newest token; the others go on."""
        results: list[SamplingResult] = []
        unfinished: list[int] = []
        for index, row in enumerate(self._rows):
            reason = self._stop_reason(row)
            if reason is None:
                unfinished.append(index)
            else:
                results.append(self._result(row, reason))
        if results:
            self._keep(unfinished)
        return results

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget requests; they give no result."""
        gone = set(request_ids)
        self._waiting = deque(row for row in self._waiting if row.request.request_id not in gone)
        keep = [index for index, row in enumerate(self._rows) if row.request.request_id not in gone]
        if len(keep) < len(self._rows):
            self._keep(keep)

    def update_weights(self, weights: Weights, version: int) -> None:
        """Copy full weights into the model; raises ``EngineError`` for wrong names, or while
        requests run.
        """
        if self.has_work():
            running = len(self._rows) + len(self._waiting)
            raise EngineError(f"weights cannot change while {running} requests run")
        own = dict(self._model.named_parameters(remove_duplicate=False))
        # by place in memory: tied parameters are one weight under several names
        missing = {parameter.data_ptr(): name for name, parameter in own.items()}
        with torch.no_grad():
            for name, value in weights:
                if name not in own:
                    raise EngineError(f"the model has no parameter '{name}'")
                own[name].copy_(as_tensor(value))
                missing.pop(own[name].data_ptr(), None)
        if missing:
            raise EngineError(f"no new weights for {', '.join(sorted(missing.values())[:5])}")
        self.policy_version = version

    def held_weights(self) -> dict[str, torch.Tensor]:
        """All parameters, under all their names."""
        return dict(self._model.named_parameters(remove_duplicate=False))

    def sleep(self, level: SleepLevel = 1) -> None:
        """Move the model to host memory, on level 2 without its weights; on CPU it is there."""
        if self._device.type == "cpu":
            return
        if level == 2:
            self._shapes = forget(self._model)
        _move(self._model, "cpu")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # or this process would keep what it no longer uses

    def wake(self, part: EnginePart | None = None) -> None:
        """Move the model back, with room for weights where they were forgotten. Keys and values
        have memory while rows run.
        """
        if part == "kv_cache":
            return
        _move(self._model, self._device)
        make_room(self._model, self._shapes)
        self._shapes = {}

    def close(self) -> None:
        """Free the model."""
        self._held = None
        self._prefixes = None
        self._rows = []
        self._waiting = deque()

    def _joining(self) -> list[_Row]:
        """The waiting rows that join now: none, or as many as there is room for."""
        count = min(len(self._waiting), self._max_num_seqs - len(self._rows))
        if count < len(self._rows) * _JOIN_SHARE and self._waited < _JOIN_WAIT:
            self._waited += bool(count)
            return []
        self._waited = 0
        return [self._waiting.popleft() for _ in range(count)]

    def _decode(self) -> torch.Tensor:
        """Logits [B, V] after each running row's last token, which joins the cache."""
        prefixes = self._prefixes
        assert prefixes is not None  # rows are running
        last = torch.tensor([[row.token_ids[-1]] for row in self._rows], device=self._device)
        prefixes.mask = torch.cat([prefixes.mask, torch.ones_like(last)], dim=1)
        position = prefixes.mask.sum(dim=1, keepdim=True) - 1
        out = self._model(
            input_ids=last,
            attention_mask=prefixes.mask,
            position_ids=position,
            past_key_values=prefixes.cache,
            use_cache=True,
        )
        return out.logits[:, -1].float()

    def _prefill(self, rows: list[_Row]) -> torch.Tensor:
        """Logits [N, V] after the prompts of ``rows``, which join the batch."""
        width = max(len(row.request.prompt_ids) for row in rows)
        ids: list[list[int]] = []
        real: list[list[int]] = []
        for row in rows:
            prompt = row.request.prompt_ids
            # On the left, so that the next token of every row is at the same column.
            padding = [0] * (width - len(prompt))
            ids.append(padding + prompt)
            real.append(padding + [1] * len(prompt))
        mask = torch.tensor(real, device=self._device)
        # padding gets position 0 as well; it is masked, so any number would do
        position = (mask.cumsum(dim=1) - 1).clamp_(min=0)
        cache = DynamicCache()
        out = self._model(
            input_ids=torch.tensor(ids, device=self._device),
            attention_mask=mask,
            position_ids=position,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._join(rows, _Prefixes(cache, mask))
        return out.logits[:, -1].float()

    def _join(self, rows: list[_Row], new: _Prefixes) -> None:
        """Put ``rows`` behind the running ones, both padded to the wider of the two."""
        self._rows = self._rows + rows
        old = self._prefixes
        if old is None:
            self._prefixes = new
            return
        width = max(old.mask.shape[1], new.mask.shape[1])
        old_pad = width - old.mask.shape[1]
        new_pad = width - new.mask.shape[1]
        old.mask = torch.cat([pad(old.mask, (old_pad, 0)), pad(new.mask, (new_pad, 0))])
        for layer, other in zip(_layers(old.cache), _layers(new.cache), strict=True):
            layer.keys = _stacked(layer.keys, old_pad, other.keys, new_pad)
            layer.values = _stacked(layer.values, old_pad, other.values, new_pad)

    def _keep(self, keep: list[int]) -> None:
        """Drop all rows but ``keep``, and the columns that are padding in all of those."""
        self._rows = [self._rows[index] for index in keep]
        prefixes = self._prefixes
        if not keep or prefixes is None:
            self._prefixes = None
            return
        # A batch that has lost its longest row should not carry that row's width any further.
        mask = prefixes.mask[keep]
        cut = int(mask.any(dim=0).int().argmax())  # the first column that holds a token
        prefixes.mask = mask[:, cut:]
        for layer in _layers(prefixes.cache):
            assert layer.keys is not None and layer.values is not None  # every layer is filled
            layer.keys = layer.keys[keep, :, cut:]
            layer.values = layer.values[keep, :, cut:]

    def _sample(self, logits: torch.Tensor) -> None:
        """Append a token and its log-prob to every row; ``logits`` [B, V]."""
        requests = [row.request for row in self._rows]
        temperature = torch.tensor(
            [request.temperature for request in requests], device=self._device
        )
        top_p = torch.tensor([request.top_p for request in requests], device=self._device)
        top_k = torch.tensor([request.top_k for request in requests], device=self._device)
        uniform = uniforms(
            np.array([row.seed for row in self._rows], dtype=np.uint64),
            np.array([len(row.token_ids) for row in self._rows]),
        )
        # truncation sorts the whole vocabulary: only where somebody asks for it
        cut_k = top_k if bool((top_k > 0).any()) else None
        cut_p = top_p if bool((top_p < 1).any()) else None
        tokens, logprobs = draw(logits, temperature, cut_k, cut_p, uniform)
        for row, token, logprob in zip(self._rows, tokens.tolist(), logprobs.tolist(), strict=True):
            row.token_ids.append(token)
            row.logprobs.append(logprob)

    def _stop_reason(self, row: _Row) -> StopReason | None:
        ids = row.token_ids
        if ids[-1] in row.plan.token_ids or self._rules.completes_string(row.plan, ids):
            return StopReason.STOP
        full = len(row.request.prompt_ids) + len(ids) >= self._max_model_len
        return StopReason.LENGTH if full or len(ids) >= row.request.max_tokens else None

    def _result(self, row: _Row, reason: StopReason) -> SamplingResult:
        return SamplingResult(
            row.request.request_id, row.token_ids, row.logprobs, reason, self.policy_version
        )


def _move(model: torch.nn.Module, device: str | torch.device) -> None:
    """Move ``model`` in place."""
    model.to(device)


def forget(model: torch.nn.Module) -> dict[str, torch.Size]:
    """Free the memory of every weight of ``model``; the shape of each by its name."""
    shapes: dict[str, torch.Size] = {}
    for name, parameter in model.named_parameters():
        shapes[name] = parameter.shape
        parameter.data = parameter.new_empty(0)
    return shapes


def make_room(model: torch.nn.Module, shapes: Mapping[str, torch.Size]) -> None:
    """Memory for the weights named in ``shapes``; what stands in it means nothing."""
    for name, shape in shapes.items():
        parameter = model.get_parameter(name)
        parameter.data = parameter.new_empty(shape)


def _layers(cache: DynamicCache) -> list[CacheLayerMixin]:
    """The layers of a cache of keys and values; ``EngineError`` where one keeps another state."""
    found = [layer for layer in cache.layers if isinstance(layer, CacheLayerMixin)]
    if len(found) < len(cache.layers):
        raise EngineError("rollout.name=hf: a layer without keys and values cannot be batched here")
    return found


def _stacked(
    first: torch.Tensor | None, first_pad: int, second: torch.Tensor | None, second_pad: int
) -> torch.Tensor:
    """Keys or values [B, H, L, D] of two batches in one, after padding on the left."""
    assert first is not None and second is not None  # both batches have been through the model
    return torch.cat([pad(first, (0, 0, first_pad, 0)), pad(second, (0, 0, second_pad, 0))])
