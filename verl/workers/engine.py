"""FSDP2 model engine: shard, run, step, save. The same code for gloo on CPUs and NCCL on GPUs, for
one rank and many.

    rows ──pack──▶ [1, T] tokens ──forward──▶ scores ──loss──▶ backward
                                                                  │ reduced over ranks
                                                                  ▼
                                                        clip, AdamW, schedule

Master weights are float32. With ``dtype=bfloat16`` the layers compute in bfloat16 and gradients are
reduced in float32.
"""

import contextlib
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from verl.config.schema.model import FSDPConfig, OptimConfig
from verl.models.policy import PackedModel
from verl.models.sequence_parallel import sequence_group
from verl.models.weights import non_finite
from verl.workers.collectives import (
    TIMEOUT,
    init_distributed,
    make_mesh,
    resolve_device,
    share_random_state,
    sum_over_ranks,
    world_size,
)
from verl.workers.compiling import compile_blocks
from verl.workers.from_rank_zero import check_same_model, take_from_rank_zero
from verl.workers.optimizer import build_optimizer, check_schedule, learning_rate

logger = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class NonFiniteWeights(RuntimeError):
    """Weights that became NaN or infinite: nothing can be learned from here on."""


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
        module: a ``PolicyModel`` or ``ValueModel``: on rank 0 with float32 weights on the CPU. What
            the others hold is not read; it may be on ``meta``.
        device: ``auto``, ``cpu`` or ``cuda``.
        dtype: what the layers compute in, ``float32`` or ``bfloat16``.
        fsdp: the ``fsdp_config`` section; None: nothing is offloaded, all ranks share one copy.
        optim: the ``optim`` section; None for a frozen model.
        grad_clip: largest gradient norm.
        sequence_ranks: how many neighbouring ranks compute a row together; ``ValueError`` where
            ranks or heads cannot be divided so.
        compiled: run the decoder layers through ``torch.compile``; ``RuntimeError`` where that
            cannot work.
    """

    def __init__(
        self,
        module: PackedModel,
        *,
        device: str = "auto",
        dtype: str | None = "float32",
        fsdp: FSDPConfig | None = None,
        optim: OptimConfig | None = None,
        grad_clip: float = 1.0,
        sequence_ranks: int = 1,
        compiled: bool = False,
    ) -> None:
        self.device = resolve_device(device)
        init_distributed(self.device)
        if dtype not in DTYPES:
            raise ValueError(f"dtype={dtype!r}: training computes in float32 or bfloat16")
        self.dtype = dtype
        self.fsdp = fsdp
        self.optim = optim
        self.grad_clip = float(grad_clip)
        if optim is None:
            module.requires_grad_(False)
        else:
            check_schedule(optim)
        self.module = module
        self.sequence_ranks = sequence_ranks
        module.group = sequence_group(module.config, sequence_ranks, self.device, TIMEOUT)
        if compiled:
            compile_blocks(module, self.device)
        self._sharded = self._shard(DTYPES[dtype])
        self.optimizer = None if optim is None else build_optimizer(module.parameters(), optim)
        self.steps = 0  # optimizer steps tried, those left out included: the schedule counts them
        self.total_steps = -1 if optim is None else optim.total_training_steps
        self._offload()

    # ------------------------------------------------------------------ placement

    def _shard(self, dtype: torch.dtype) -> list[FSDPModule]:
        """Shard the decoder layers one by one, then what is around them; returns the parts.

        FSDP takes a part to the device when it is that part's turn.
        """
        fsdp = self.fsdp
        offload = self.device == "cuda" and fsdp is not None and fsdp.offload_policy
        check_same_model(self.module)
        share_random_state()  # a rank that reads a model draws other numbers than one that does not
        mesh = make_mesh(self.device, -1 if fsdp is None else fsdp.fsdp_size)
        precision = MixedPrecisionPolicy(
            param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32
        )
        parts: list[FSDPModule] = []
        # the layers first: the root takes only the parameters that no other part has taken
        for part in (*self.module.blocks, self.module):
            take_from_rank_zero(part, self.device)
            sharded = fully_shard(
                part,
                mesh=mesh,
                mp_policy=precision,
                reshard_after_forward=True if fsdp is None else fsdp.reshard_after_forward,
                offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy(),
            )
            parts.append(sharded)
        return parts

    @property
    def moves(self) -> bool:
        """Whether parameters or optimizer state rest in host memory between passes."""
        by_fsdp = self.fsdp is not None and self.fsdp.offload_policy
        return self.device == "cuda" and not by_fsdp

    def reshard(self) -> None:
        """Keep this rank's shards only: a forward without backward may leave gathered parameters
        behind.
        """
        for part in self._sharded:
            part.reshard()

    def _offload(self) -> None:
        if not self.moves:
            return
        self.reshard()
        if self.fsdp is not None and self.fsdp.param_offload:
            self.module.to("cpu")
        if self.fsdp is not None and self.fsdp.optimizer_offload:
            self._move_optimizer("cpu")
        torch.cuda.empty_cache()  # what is freed here is the rollout engine's while it plays

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

    def has_turn(self, turn: int) -> bool:
        """Whether the pass of this ``turn`` (below ``sequence_ranks``) is over rows of this rank;
        if not, ``module.take_part()`` is what it does for those of another.
        """
        return self.module.group is None or self.module.group.take_turn(turn)

    # ------------------------------------------------------------------ training

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """Accumulate the gradient of this rank's share of the mini-batch loss; ``last`` of the
        mini-batch. It is reduced over ranks every time, or, without
        ``fsdp.reduce_every_micro_batch``, the last time.

        Losses of all micro-batches and ranks *add up*: each is divided by the mini-batch's global
        denominator before.
        """
        # One rank holds the whole gradient either way, and has nobody to reduce it with.
        every = world_size() > 1 and (self.fsdp is None or self.fsdp.reduce_every_micro_batch)
        self._sharded[-1].set_requires_gradient_sync(last or every)  # the root tells its layers
        # FSDP averages over ranks, so that the sum needs the factor back
        (loss * world_size()).backward()

    def step(self) -> StepReport:
        """Clip, take one AdamW step and advance the schedule.

        A gradient that is not finite is thrown away and counted. A gradient of exactly zero leaves
        the weights untouched: momentum and weight decay alone would otherwise move them without any
        evidence.
        """
        optimizer = self._trained_by()
        lr = self._next_lr(optimizer)
        trained = [p for p in self.module.parameters() if p.grad is not None]
        total = nn.utils.clip_grad_norm_(trained, self.grad_clip) if trained else torch.zeros(())
        # of a sharded gradient the norm is a DTensor: full_tensor() adds up the ranks' shares
        norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
        finite = math.isfinite(norm)
        if finite and norm > 0.0:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if not finite:
            logger.warning("gradient norm is %s: optimizer step %d is left out", norm, self.steps)
        return StepReport(
            grad_norm=norm if finite else 0.0, lr=lr, skipped=not finite, zero=norm == 0.0
        )

    def pass_over(self) -> StepReport:
        """Count a step whose gradient is known to be zero: the schedule advances, nothing else
        does.
        """
        return StepReport(grad_norm=0.0, lr=self._next_lr(self._trained_by()), zero=True)

    def require_finite(self) -> None:
        """Raise ``NonFiniteWeights``, on all ranks, where a weight on any of them is NaN or
        infinite; a collective call, made where the parameters are on the device.
        """
        self.reshard()
        parts = (
            (name, weight.to_local() if isinstance(weight, DTensor) else weight)
            for name, weight in self.module.named_parameters()
        )
        odd = non_finite(parts)
        if sum_over_ranks([len(odd)])[0]:
            first = f" (the first here: {odd[0]})" if odd else " of another rank"
            raise NonFiniteWeights(
                f"after {self.steps} optimizer steps {len(odd)} weights{first} are NaN or "
                "infinite; they are not saved; fix: continue from the last checkpoint with a lower "
                "optim.lr"
            )

    def _trained_by(self) -> torch.optim.AdamW:
        if self.optimizer is None:
            raise RuntimeError("the model is frozen (no optim section): it takes no optimizer step")
        return self.optimizer

    def _next_lr(self, optimizer: torch.optim.AdamW) -> float:
        """Set the rate of this step, and count it: also one that is left out moves the schedule."""
        assert self.optim is not None  # an optimizer is built from it
        lr = learning_rate(self.steps, self.optim, self.total_steps)
        self.steps += 1
        for group in optimizer.param_groups:
            group["lr"] = lr
        return lr
