"""FSDP2 model engine: shard, run, step, save. The same code for gloo on CPUs and NCCL on GPUs, for
one rank and many.

    rows ──pack──▶ [1, T] tokens ──forward──▶ scores ──loss──▶ backward ──(last micro-batch)──▶ clip, AdamW, schedule

Master weights are float32. With ``dtype=bfloat16`` the layers compute in bfloat16 and gradients are
reduced in float32.
"""

import contextlib
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from verl.workers.collectives import init_distributed, make_mesh, resolve_device, world_size
from verl.workers.optimizer import build_optimizer, check_schedule, learning_rate

logger = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step did: gradient norm before clipping, learning rate, whether it was
    taken or left out.
    """

    grad_norm: float
    lr: float
    skipped: bool = False  # the gradient was not finite
    zero: bool = False  # the gradient was exactly zero


class TrainEngine:
    """Owns a model on this rank's device, and its optimizer.

    Args:
        module: a ``PolicyModel`` or ``ValueModel`` with float32 weights on the CPU; equal on every
            rank.
        device: ``auto``, ``cpu`` or ``cuda``.
        dtype: what the layers compute in, ``float32`` or ``bfloat16``.
        fsdp: the ``fsdp_config`` section (``param_offload, optimizer_offload, offload_policy,
            reshard_after_forward, fsdp_size``).
        optim: the ``optim`` section; None for a frozen model.
        grad_clip: largest gradient norm.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        device: str = "auto",
        dtype: str = "float32",
        fsdp: Any = None,
        optim: Any = None,
        grad_clip: float = 1.0,
    ) -> None:
        self.device = resolve_device(device)
        init_distributed(self.device)
        if dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype={dtype!r}: training computes in float32 or bfloat16")
        self.fsdp, self.optim, self.grad_clip = fsdp, optim, float(grad_clip)
        if optim is None:
            module.requires_grad_(False)
        else:
            check_schedule(optim)
        self.module = self._shard(module, DTYPES[dtype])
        self.optimizer = None if optim is None else build_optimizer(module.parameters(), optim)
        self.steps = 0  # optimizer steps tried, those left out included: the schedule counts them
        self.total_steps = -1 if optim is None else int(optim.total_training_steps or -1)
        self._offload()

    # ------------------------------------------------------------------ placement

    def _flag(self, name: str, default: Any = False) -> Any:
        return default if self.fsdp is None else getattr(self.fsdp, name, default)

    def _shard(self, module: nn.Module, dtype: torch.dtype) -> nn.Module:
        mesh = make_mesh(self.device, self._flag("fsdp_size", -1))
        policy: dict[str, Any] = {
            "mesh": mesh,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32
            ),
            "reshard_after_forward": bool(self._flag("reshard_after_forward", True)),
        }
        if self.device == "cuda":
            if self._flag("offload_policy"):
                policy["offload_policy"] = CPUOffloadPolicy()
            else:
                module.to("cuda")
        for block in module.blocks:
            fully_shard(block, **policy)
        fully_shard(module, **policy)
        return module

    @property
    def moves(self) -> bool:
        """Whether parameters or optimizer state rest in host memory between passes."""
        return self.device == "cuda" and not self._flag("offload_policy")

    def _offload(self) -> None:
        if not self.moves:
            return
        for part in (*self.module.blocks, self.module):
            part.reshard()  # a forward without backward may leave gathered parameters behind
        if self._flag("param_offload"):
            self.module.to("cpu")
        if self._flag("optimizer_offload"):
            self._move_optimizer("cpu")
        torch.cuda.empty_cache()

    def _move_optimizer(self, device: str) -> None:
        for state in self.optimizer.state.values() if self.optimizer else ():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim() > 0:
                    state[key] = value.to(device)

    @contextlib.contextmanager
    def resident(self, training: bool = False) -> Iterator[None]:
        """Parameters (and, for training, optimizer state) are on the device inside, and back where
        they rest after.
        """
        if self.moves:
            self.module.to(self.device)
            if training:
                self._move_optimizer(self.device)
        self.module.train(training)
        try:
            yield
        finally:
            self._offload()

    # ------------------------------------------------------------------ training

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """Accumulate the gradient of this rank's share of the mini-batch loss; ``last`` reduces
        over ranks.

        Losses of all micro-batches and ranks *add up*: each is divided by the mini-batch's global
        denominator before.
        """
        self.module.set_requires_gradient_sync(last)
        # FSDP averages over ranks, so that the sum needs the factor back
        (loss * world_size()).backward()

    def step(self) -> StepReport:
        """Clip, take one AdamW step and advance the schedule.

        A gradient that is not finite is thrown away and counted. A gradient of exactly zero leaves
        the weights untouched: momentum and weight decay alone would otherwise move them without any
        evidence.
        """
        lr = self._next_lr()
        trained = [p for p in self.module.parameters() if p.grad is not None]
        norm = nn.utils.clip_grad_norm_(trained, self.grad_clip) if trained else torch.zeros(())
        norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        finite = math.isfinite(norm)
        if finite and norm > 0.0:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if not finite:
            logger.warning("gradient norm is %s: optimizer step %d is left out", norm, self.steps)
        return StepReport(
            grad_norm=norm if finite else 0.0, lr=lr, skipped=not finite, zero=norm == 0.0
        )

    def pass_over(self) -> StepReport:
        """Count a step whose gradient is known to be zero: the schedule advances, nothing else
        does.
        """
        return StepReport(grad_norm=0.0, lr=self._next_lr(), zero=True)

    def _next_lr(self) -> float:
        lr = learning_rate(self.steps, self.optim, self.total_steps)
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr
