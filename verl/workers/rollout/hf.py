"""The engine that needs no vLLM: a transformers model decoded in one left-padded batch with a
shared KV cache.

cache columns   . . . a a a a a      a row is left-padded to the widest; when rows finish, columns that have become
                . b b b b b b b      padding everywhere are cut off; new rows are prefilled together and joined on
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from verl.models.token_scores import full_logits
from verl.utils.sampling import SamplingRequest, SamplingResult, StopReason
from verl.workers.rollout.base import (
    EngineError,
    RequestSeeds,
    StopPlan,
    StopRules,
    as_tensor,
    check_request,
    end_token_ids,
)
from verl.workers.rollout.draw import draw, uniforms


@dataclass(slots=True)
class _Row:
    """One running request."""

    request: SamplingRequest
    plan: StopPlan
    seed: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class HFEngine:
    """``RolloutEngine`` on transformers. ``config`` is the section ``actor_rollout_ref.rollout``.

    Every step gives each running request one token; waiting requests join at the next step,
    ``max_num_seqs`` at most.
    """

    gives_logprobs = True

    def __init__(
        self,
        config: Any,
        model_path: str,
        seed: int = 0,
        num_threads: int | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        options = {"trust_remote_code": trust_remote_code}
        model = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=getattr(torch, config.dtype), **options
        )
        model = (
            model.to("cuda" if torch.cuda.is_available() else "cpu").eval().requires_grad_(False)
        )
        head = model.get_output_embeddings()
        if model.dtype != torch.float32 and isinstance(head, torch.nn.Linear):
            head.forward = partial(full_logits, head)  # as the trainer computes them
        tokenizer = AutoTokenizer.from_pretrained(model_path, **options)
        rules = StopRules(tokenizer, end_token_ids(model_path, tokenizer))
        self._take(model, rules, seed, config.max_num_seqs, config.max_model_len)

    @classmethod
    def on_model(
        cls,
        model: Any,
        tokenizer: Any,
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
        self, model: Any, rules: StopRules, seed: int, max_num_seqs: int, max_model_len: int | None
    ) -> None:
        self._model, self._rules, self._seeds = model, rules, RequestSeeds(seed)
        self._device = model.device
        self._vocab_size = model.config.vocab_size
        self._max_model_len = max_model_len or model.config.max_position_embeddings
        self._max_num_seqs = max_num_seqs
        self._waiting: deque[_Row] = deque()
        self._rows: list[_Row] = []
        self._cache: Any = None  # DynamicCache of the rows' tokens except each row's last one
        self._mask: torch.Tensor | None = None  # [B, L] int64: 1 where the cache holds a real token
        self.policy_version = 0

    def add(self, request: SamplingRequest) -> None:
        """Queue a request. Raises ``ValueError`` for one that can never be served."""
        check_request(request, self._max_model_len, self._vocab_size)
        self._waiting.append(
            _Row(request, self._rules.plan(tuple(request.stop)), self._seeds.of(request))
        )

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
            fresh = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._room()))]
            if fresh:
                logits.append(self._prefill(fresh))
            if not logits:
                return []
            self._sample(torch.cat(logits))
            reasons = [self._stop_reason(row) for row in self._rows]
            results = [
                self._result(row, why) for row, why in zip(self._rows, reasons, strict=True) if why
            ]
            if results:
                self._keep([index for index, why in enumerate(reasons) if why is None])
        return results

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget requests; they give no result."""
        gone = set(request_ids)
        self._waiting = deque(row for row in self._waiting if row.request.request_id not in gone)
        keep = [index for index, row in enumerate(self._rows) if row.request.request_id not in gone]
        if len(keep) < len(self._rows):
            self._keep(keep)

    def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Copy full weights into the model; raises ``EngineError`` for wrong names, or while
        requests run.
        """
        if self.has_work():
            raise EngineError(
                f"weights cannot change while {len(self._rows) + len(self._waiting)} requests run"
            )
        own = dict(self._model.named_parameters(remove_duplicate=False))
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

    def sleep(self) -> None:
        """Move the model to host memory."""
        self._model.to("cpu")

    def wake(self) -> None:
        """Move the model back."""
        self._model.to(self._device)

    def close(self) -> None:
        """Free the model."""
        self._model = self._cache = self._mask = None
        self._rows, self._waiting = [], deque()

    def _room(self) -> int:
        return self._max_num_seqs - len(self._rows)

    def _decode(self) -> torch.Tensor:
        """Logits [B, V] after each running row's last token, which joins the cache."""
        last = torch.tensor([[row.token_ids[-1]] for row in self._rows], device=self._device)
        self._mask = torch.cat([self._mask, torch.ones_like(last)], dim=1)
        position = self._mask.sum(dim=1, keepdim=True) - 1
        out = self._model(
            input_ids=last,
            attention_mask=self._mask,
            position_ids=position,
            past_key_values=self._cache,
            use_cache=True,
        )
        return out.logits[:, -1].float()

    def _prefill(self, rows: list[_Row]) -> torch.Tensor:
        """Logits [N, V] after the prompts of ``rows``, which join the batch."""
        width = max(len(row.request.prompt_ids) for row in rows)
        padding = [width - len(row.request.prompt_ids) for row in rows]
        ids = [[0] * left + row.request.prompt_ids for left, row in zip(padding, rows, strict=True)]
        mask = [[0] * left + [1] * (width - left) for left in padding]
        ids, mask = torch.tensor(ids, device=self._device), torch.tensor(mask, device=self._device)
        position = (mask.cumsum(dim=1) - 1).clamp_(min=0)
        cache = DynamicCache()
        out = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=position,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._join(rows, cache, mask)
        return out.logits[:, -1].float()

    def _join(self, rows: list[_Row], cache: Any, mask: torch.Tensor) -> None:
        self._rows = self._rows + rows
        if self._cache is None:
            self._cache, self._mask = cache, mask
            return
        width = max(self._mask.shape[1], mask.shape[1])
        old_pad, new_pad = width - self._mask.shape[1], width - mask.shape[1]
        self._mask = torch.cat([pad(self._mask, (old_pad, 0)), pad(mask, (new_pad, 0))])
        for old, new in zip(self._cache.layers, cache.layers, strict=True):
            old.keys = torch.cat(
                [pad(old.keys, (0, 0, old_pad, 0)), pad(new.keys, (0, 0, new_pad, 0))]
            )
            old.values = torch.cat(
                [pad(old.values, (0, 0, old_pad, 0)), pad(new.values, (0, 0, new_pad, 0))]
            )

    def _keep(self, keep: list[int]) -> None:
        """Drop all rows but ``keep``, and the columns that are padding in all of those."""
        self._rows = [self._rows[index] for index in keep]
        if not keep:
            self._cache = self._mask = None
            return
        self._mask = self._mask[keep]
        cut = int(self._mask.any(dim=0).int().argmax())  # the first column that holds a token
        self._mask = self._mask[:, cut:]
        for layer in self._cache.layers:
            layer.keys, layer.values = layer.keys[keep, :, cut:], layer.values[keep, :, cut:]

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
        tokens, logprobs = draw(
            logits,
            temperature,
            top_k if bool((top_k > 0).any()) else None,
            top_p if bool((top_p < 1).any()) else None,
            uniform,
        )
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
