"""FSDP2 model engine: shard a model, run forward and backward passes, take optimizer steps.

The same code runs with gloo on CPUs and NCCL on GPUs, with one rank or many.

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
from collections.abc import Iterable, Iterator, Sequence
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
from verl.models.forward_kind import (
    ForwardSettings,
    PackedForward,
    RowWiseForward,
    decode_forward_kind,
    encode_forward_kind,
)
from verl.models.packed_attention import increase_recompile_limit
from verl.models.policy import PackedModel
from verl.models.sequence_parallel import create_sequence_group
from verl.models.weights import find_non_finite
from verl.names import PrefixTree
from verl.workers.collectives import (
    TIMEOUT,
    broadcast_module,
    broadcast_text,
    check_same_model,
    init_distributed,
    make_mesh,
    resolve_device,
    share_random_state,
    sum_over_ranks,
    world_size,
)

logger = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class NonFiniteWeightsError(RuntimeError):
    """Error raised when a weight became NaN or infinite, so that training cannot continue."""


@dataclass(frozen=True)
class StepReport:
    """Result of one optimizer step. ``grad_norm`` is the norm of the gradient before clipping."""

    grad_norm: float
    lr: float
    is_skipped: bool = False  # the gradient was not finite
    has_zero_gradient: bool = False  # the gradient was exactly zero


class TrainEngine:
    """Model on the device of this rank, sharded by FSDP2, with its optimizer.

    Args:
        module: a ``PolicyModel`` or ``ValueModel``, on rank 0 with float32 weights on the CPU. The
            weights of other ranks are ignored and may be on ``meta``.
        device: ``auto``, ``cpu`` or ``cuda``.
        dtype: compute dtype of the layers, ``float32`` or ``bfloat16``.
        fsdp: the ``fsdp_config`` section. None: the defaults of ``FSDPConfig``.
        optim: the ``optim`` section; None for a frozen model.
        grad_clip: largest gradient norm.
        sequence_ranks: number of neighbouring ranks that compute a row together. Raises
            ``ValueError`` if it does not fit the number of ranks or heads.
        compiled: compile the decoder layers with ``torch.compile``. Raises ``RuntimeError`` if
            compilation fails.
        prefix_tree: merge rows that share prefixes; see ``verl.models.prefix_tree``.
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
        prefix_tree: PrefixTree = False,
    ) -> None:
        self.device = resolve_device(device)
        if self.device == "cuda":
            # cuDNN prepares a kernel for each new shape, and packed rows have new shapes in almost
            # every call. Importing vLLM, as some weight transports do, also disables cuDNN.
            torch.backends.cuda.enable_cudnn_sdp(False)
        init_distributed(self.device)
        if dtype not in DTYPES:
            raise ValueError(f"dtype={dtype!r}; allowed for training: float32 and bfloat16")
        self.dtype = dtype
        self.fsdp = fsdp or FSDPConfig()
        self.optim = optim
        self.grad_clip = float(grad_clip)
        if optim is None:
            module.requires_grad_(False)
        self.module = module
        self.sequence_ranks = sequence_ranks
        # Only rank 0 can choose the kind of forward pass: the choice compares log-probs, and only
        # rank 0 has weights.
        module.forward_kind = decode_forward_kind(
            broadcast_text(encode_forward_kind(module.forward_kind))
        )
        # Row-wise passes compute each row separately, so they cannot share the prefixes of rows.
        self.prefix_tree: PrefixTree = (
            prefix_tree if isinstance(module.forward_kind, PackedForward) else False
        )
        if sequence_ranks > 1 and isinstance(module.forward_kind, RowWiseForward):
            raise ValueError(
                f"ulysses_sequence_parallel_size={sequence_ranks}: the model has row-wise forward "
                f"passes ({module.forward_kind.not_packed_reason}), which one rank computes; "
                "allowed: 1; fix: ulysses_sequence_parallel_size=1"
            )
        module.sequence_group = create_sequence_group(
            module.config, sequence_ranks, self.device, TIMEOUT
        )
        if compiled and isinstance(module.forward_kind, RowWiseForward):
            logger.warning(
                "use_torch_compile=true has no effect: row-wise passes are not compiled (%s)",
                module.forward_kind.not_packed_reason,
            )
        elif compiled:
            compile_blocks(module, self.device)
        self._sharded_modules = self._shard_model(DTYPES[dtype])
        self.optimizer = None if optim is None else build_optimizer(module.parameters(), optim)
        self.steps = 0  # optimizer steps, including skipped ones, because the schedule counts them
        self._offload_state()

    # ------------------------------------------------------------------ placement

    def _shard_model(self, dtype: torch.dtype) -> list[FSDPModule]:
        """Shard each decoder layer, then the rest of the model, and return the sharded modules."""
        uses_cpu_offload = self.device == "cuda" and self.fsdp.offload_policy
        check_same_model(self.module)
        share_random_state()  # only rank 0 used random numbers while loading
        mesh = make_mesh(self.device, self.fsdp.fsdp_size)
        precision_policy = MixedPrecisionPolicy(
            param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32
        )
        sharded_modules: list[FSDPModule] = []
        # Layers are sharded first. The root then shards only the parameters outside of them.
        for submodule in (*self.module.sharded_layers, self.module):
            broadcast_module(submodule, self.device)
            sharded_module = fully_shard(
                submodule,
                mesh=mesh,
                mp_policy=precision_policy,
                reshard_after_forward=self.fsdp.reshard_after_forward,
                offload_policy=CPUOffloadPolicy() if uses_cpu_offload else OffloadPolicy(),
            )
            sharded_modules.append(sharded_module)
        return sharded_modules

    @property
    def forward_settings(self) -> ForwardSettings:
        """Settings that determine how many tokens the forward passes of given rows compute."""
        return ForwardSettings(self.module.forward_kind, self.prefix_tree)

    @property
    def can_offload_state(self) -> bool:
        """True if this engine may move parameters and optimizer state between host and GPU.

        False on CPU, and with ``offload_policy``, because FSDP then moves them.
        """
        return self.device == "cuda" and not self.fsdp.offload_policy

    def reshard_parameters(self) -> None:
        """Free gathered parameters, which a forward without backward may leave allocated."""
        for submodule in self._sharded_modules:
            submodule.reshard()

    def _offload_state(self) -> None:
        if self.device != "cuda":
            return
        self.reshard_parameters()
        if self.can_offload_state and self.fsdp.param_offload:
            self.module.to("cpu")
        if self.can_offload_state and self.fsdp.optimizer_offload:
            self._move_optimizer("cpu")
        torch.cuda.empty_cache()  # makes the memory available to the rollout engine

    def _move_optimizer(self, device: str) -> None:
        for state in self.optimizer.state.values() if self.optimizer else ():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim() > 0:
                    state[key] = value.to(device)

    @contextlib.contextmanager
    def model_on_device(self, training: bool = False) -> Iterator[None]:
        """Move the parameters to the device for the time of the context.

        With ``training`` the optimizer state is moved too. At the end, the config decides if they
        are offloaded again.
        """
        if self.can_offload_state:
            self.module.to(self.device)
            if training:
                self._move_optimizer(self.device)
        self.module.train(training)
        try:
            yield
        finally:
            self._offload_state()

    def begin_pass_for_rank(self, owner_rank: int) -> bool:
        """Begin a pass that computes the rows of one rank, and return True if it is this rank.

        ``owner_rank`` is the index of the rank in the group of ``sequence_ranks`` ranks that
        compute each row together. For another owner the caller runs ``module.compute_zero_loss()``.
        """
        group = self.module.sequence_group
        return group is None or group.begin_pass_for_rank(owner_rank)

    # ------------------------------------------------------------------ training

    def backward(self, loss: torch.Tensor, is_last_micro_batch: bool) -> None:
        """Add the gradient of ``loss``, this rank's part of the mini-batch loss.

        With ``fsdp.reduce_every_micro_batch`` (default), gradients are reduced over ranks in every
        call, otherwise only in calls with ``is_last_micro_batch``. Losses of all micro-batches and
        ranks *add up*: the caller divides each loss by the denominator of the whole mini-batch.
        """
        # With one rank there is nothing to reduce.
        reduces_every_pass = world_size() > 1 and self.fsdp.reduce_every_micro_batch
        # The setting of the root module also applies to the layers.
        self._sharded_modules[-1].set_requires_gradient_sync(
            is_last_micro_batch or reduces_every_pass
        )
        # FSDP averages gradients over ranks. The factor turns the mean into a sum.
        (loss * world_size()).backward()

    def step(self) -> StepReport:
        """Clip the gradient, take one AdamW step and advance the schedule.

        A gradient that is not finite is discarded and reported as ``is_skipped``. For a gradient of
        exactly zero the optimizer step is omitted: momentum and weight decay would change the
        weights.
        """
        lr = self._advance_lr_schedule()
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        total_norm = (
            nn.utils.clip_grad_norm_(parameters, self.grad_clip) if parameters else torch.zeros(())
        )
        # The norm of sharded gradients is a DTensor, and full_tensor() combines all ranks.
        grad_norm = float(
            total_norm.full_tensor() if isinstance(total_norm, DTensor) else total_norm
        )
        is_finite = math.isfinite(grad_norm)
        if is_finite and grad_norm > 0.0:
            self._trained_optimizer.step()
        self._trained_optimizer.zero_grad(set_to_none=True)
        if not is_finite:
            logger.warning(
                "gradient norm is %s: optimizer step %d is skipped", grad_norm, self.steps
            )
        return StepReport(
            grad_norm=grad_norm if is_finite else 0.0,
            lr=lr,
            is_skipped=not is_finite,
            has_zero_gradient=grad_norm == 0.0,
        )

    def skip_step(self) -> StepReport:
        """Advance the schedule by a step whose gradient is known to be zero."""
        return StepReport(grad_norm=0.0, lr=self._advance_lr_schedule(), has_zero_gradient=True)

    def check_finite_weights(self) -> None:
        """Raise ``NonFiniteWeightsError`` on all ranks if a weight on any rank is NaN or infinite.

        This is a collective call. Parameters must be on the device.
        """
        self.reshard_parameters()
        local_weights = (
            (name, weight.to_local() if isinstance(weight, DTensor) else weight)
            for name, weight in self.module.named_parameters()
        )
        non_finite_names = find_non_finite(local_weights)
        if sum_over_ranks([len(non_finite_names)])[0]:
            faulty_weights_text = (
                f"{len(non_finite_names)} weights (first: {non_finite_names[0]})"
                if non_finite_names
                else "weights of another rank"
            )
            raise NonFiniteWeightsError(
                f"after {self.steps} optimizer steps {faulty_weights_text} are NaN or infinite; "
                "they are not saved; fix: continue from the last checkpoint with a lower optim.lr"
            )

    @property
    def _trained_optimizer(self) -> torch.optim.AdamW:
        if self.optimizer is None:
            raise RuntimeError("the model is frozen (no optim section) and cannot be updated")
        return self.optimizer

    def _advance_lr_schedule(self) -> float:
        """Set and return the learning rate of this step, and count the step.

        Skipped steps are counted too.
        """
        optimizer = self._trained_optimizer
        assert self.optim is not None  # an optimizer exists only with an ``optim`` section
        lr = learning_rate(self.steps, self.optim)
        self.steps += 1
        for group in optimizer.param_groups:
            group["lr"] = lr
        return lr


def compile_blocks(module: PackedModel, device: str) -> None:
    """Let ``torch.compile`` compile every decoder layer of ``module`` in its first forward.

        norm, projections, rotation ──▶ attention, not compiled ──▶ projection, norm, feed-forward
              one graph                                                one graph

    Layers are compiled separately, because FSDP gathers and frees parameters between them. Layers
    of one class share their graphs. Raises ``RuntimeError`` if nothing can be compiled for
    ``device``.
    """
    _check_compiler(device)
    increase_recompile_limit()
    for block in module.sharded_layers:
        # Compile only ``forward``, without the hooks of FSDP and checkpointing.
        block.forward = torch.compile(block.forward, dynamic=True)


def _check_compiler(device: str) -> None:
    """Compile a tiny function to raise ``RuntimeError`` early if the compiler is missing."""
    # Imported here, because the import takes seconds and few runs use the compiler.
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        torch.compile(lambda numbers: (2.0 * numbers + 1.0).sin())(torch.ones(8, device=device))
    except (TorchDynamoException, InvalidCxxCompiler) as error:
        compiler = "Triton" if device == "cuda" else "a C++ compiler"
        raise RuntimeError(
            f"use_torch_compile=true: torch.compile fails for {device} on this machine "
            f"({str(error).splitlines()[0]}); fix: install {compiler}, or set it to false"
        ) from error


# ---- optimizer: AdamW with linear warm-up and a constant or cosine schedule ----------------------


def build_optimizer(
    parameters: Iterable[torch.nn.Parameter], optim: OptimConfig
) -> torch.optim.AdamW:
    """Create AdamW for the trainable parameters, with weight decay on matrices only."""
    trained_parameters = [p for p in parameters if p.requires_grad]
    matrices = [p for p in trained_parameters if p.dim() >= 2]
    vectors = [p for p in trained_parameters if p.dim() < 2]
    parameter_groups = [
        {"params": matrices, "weight_decay": float(optim.weight_decay)},
        {"params": vectors, "weight_decay": 0.0},
    ]
    beta1, beta2 = optim.betas
    can_use_fused = can_use_fused_adamw(trained_parameters)
    return torch.optim.AdamW(
        parameter_groups,
        lr=float(optim.lr),
        betas=(beta1, beta2),
        eps=float(optim.eps),
        foreach=not can_use_fused,
        fused=can_use_fused,
    )


def can_use_fused_adamw(parameters: Sequence[torch.nn.Parameter]) -> bool:
    """Return True if AdamW can use its fused kernel: all parameters are on CUDA."""
    return bool(parameters) and all(p.device.type == "cuda" for p in parameters)


def learning_rate(step: int, optim: OptimConfig) -> float:
    """Return the learning rate of optimizer step ``step`` (from 0).

    The rate rises linearly from ``lr / w`` to ``lr`` over ``w`` warm-up steps. ``w`` is
    ``lr_warmup_steps`` if it is not negative, else
    ``lr_warmup_steps_ratio * total_training_steps``. Then the rate is constant, or follows a cosine
    from ``lr`` to ``lr * min_lr_ratio`` in the last step.
    """
    warmup_steps, total_steps = optim.lr_warmup_steps, optim.total_training_steps
    if warmup_steps < 0:  # -1 means that only the ratio is set
        warmup_steps = int(optim.lr_warmup_steps_ratio * max(total_steps, 0))
    peak_lr = float(optim.lr)
    if step < warmup_steps:
        # The first rate is peak_lr / warmup_steps and not 0: a step with rate 0 has no effect.
        return peak_lr * (step + 1) / warmup_steps
    if optim.warmup_style == "constant":
        return peak_lr
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - 1 - warmup_steps))
    min_lr_ratio = float(optim.min_lr_ratio)
    return peak_lr * (
        min_lr_ratio + (1.0 - min_lr_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))
    )
