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
    trained = [p for p in parameters if p.requires_grad]
    matrices = [p for p in trained if p.dim() >= 2]
    vectors = [p for p in trained if p.dim() < 2]
    groups = []
    if matrices:
        groups.append({"params": matrices, "weight_decay": float(optim.weight_decay)})
    if vectors:
        groups.append({"params": vectors, "weight_decay": 0.0})
    beta1, beta2 = optim.betas
    fused = can_fuse(trained)
    return torch.optim.AdamW(
        groups,
        lr=float(optim.lr),
        betas=(beta1, beta2),
        eps=float(optim.eps),
        foreach=not fused,
        fused=fused,
    )


def can_fuse(parameters: Sequence[torch.nn.Parameter]) -> bool:
    """Return True if AdamW can use its fused kernel: all parameters are on CUDA."""
    return bool(parameters) and all(p.device.type == "cuda" for p in parameters)


def check_schedule(optim: OptimConfig) -> None:
    """Raise ``ValueError`` if the schedule needs ``total_training_steps`` and that is not set."""
    if optim.total_training_steps > 0:
        return
    steps_given = optim.lr_warmup_steps >= 0
    if optim.warmup_style == "cosine":
        setting = "warmup_style=cosine"
    elif optim.lr_warmup_steps_ratio > 0 and not steps_given:
        setting = "lr_warmup_steps_ratio"
    else:
        return
    raise ValueError(
        f"{setting} needs the number of optimizer steps of the whole run; fix: set "
        "optim.total_training_steps"
    )


def learning_rate(step: int, optim: OptimConfig, total_steps: int) -> float:
    """Return the learning rate of optimizer step ``step`` (from 0).

    The rate rises linearly from ``lr / w`` to ``lr`` over ``w`` warm-up steps: ``lr_warmup_steps``
    if it is not negative, else ``lr_warmup_steps_ratio * total_steps``. Then it is constant,
    or follows a cosine from ``lr`` to ``lr * min_lr_ratio`` at the last of ``total_steps``. The
    cosine needs a positive ``total_steps``.
    """
    warm = optim.lr_warmup_steps
    if warm < 0:  # not set
        warm = int(optim.lr_warmup_steps_ratio * max(total_steps, 0))
    peak = float(optim.lr)
    if step < warm:
        # starts at lr / w and not at 0: a step with rate 0 would have no effect
        return peak * (step + 1) / warm
    if optim.warmup_style == "constant":
        return peak
    progress = min(1.0, (step - warm) / max(1, total_steps - 1 - warm))
    min_ratio = float(optim.min_lr_ratio)
    return peak * (min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress)))
