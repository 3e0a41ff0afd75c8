"""AdamW with linear warm-up and a constant or cosine schedule."""

import math
from collections.abc import Iterable, Sequence

import torch

from verl.config.schema.model import OptimConfig


def build_optimizer(
    parameters: Iterable[torch.nn.Parameter], optim: OptimConfig
) -> torch.optim.AdamW:
    """Create AdamW for the trainable parameters, with weight decay on matrices only.

    Vectors (norms, biases) have no weight decay. Weight decay also changes parameters whose
    gradient is zero. ``TrainEngine.step`` therefore omits the step if the whole gradient is zero.
    """
    trained_parameters = [p for p in parameters if p.requires_grad]
    matrices = [p for p in trained_parameters if p.dim() >= 2]
    vectors = [p for p in trained_parameters if p.dim() < 2]
    parameter_groups = []
    if matrices:
        parameter_groups.append({"params": matrices, "weight_decay": float(optim.weight_decay)})
    if vectors:
        parameter_groups.append({"params": vectors, "weight_decay": 0.0})
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


def check_schedule(optim: OptimConfig) -> None:
    """Raise ``ValueError`` if the schedule needs ``total_training_steps`` and that is not set."""
    if optim.total_training_steps > 0:
        return
    has_warmup_steps = optim.lr_warmup_steps >= 0
    if optim.warmup_style == "cosine":
        setting = "warmup_style=cosine"
    elif optim.lr_warmup_steps_ratio > 0 and not has_warmup_steps:
        setting = "lr_warmup_steps_ratio"
    else:
        return
    raise ValueError(
        f"{setting} needs the number of optimizer steps of the whole run; fix: set "
        "optim.total_training_steps"
    )


def learning_rate(step: int, optim: OptimConfig, total_steps: int) -> float:
    """Return the learning rate of optimizer step ``step`` (from 0).

    The rate rises linearly from ``lr / w`` to ``lr`` over ``w`` warm-up steps. ``w`` is
    ``lr_warmup_steps`` if it is not negative, else ``lr_warmup_steps_ratio * total_steps``. Then
    the rate is constant, or follows a cosine from ``lr`` to ``lr * min_lr_ratio`` at the last of
    ``total_steps``. The cosine needs a positive ``total_steps``.
    """
    warmup_steps = optim.lr_warmup_steps
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
