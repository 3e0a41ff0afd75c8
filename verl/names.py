"""Names that a configuration chooses among, once for the settings and for the code that acts on
them.

Imports no library, so that the settings stay light. What a registry can add to (estimators, policy
losses, engines) is listed here as it ships.
"""

from enum import StrEnum
from typing import Any, Literal, get_args

LossAggMode = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]
LOSS_AGG_MODES: tuple[LossAggMode, ...] = get_args(LossAggMode)

KLEstimator = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "low_var_kl+", "k3+"
]
KL_ESTIMATORS: tuple[KLEstimator, ...] = get_args(KLEstimator)

NormMode = Literal["mean_norm", "mean_std_norm"]
NORM_MODES: tuple[NormMode, ...] = get_args(NormMode)

RowWeight = Literal["row", "trajectory"]
ROW_WEIGHTS: tuple[RowWeight, ...] = get_args(RowWeight)

RolloutIS = Literal["token", "sequence"]
ROLLOUT_IS: tuple[RolloutIS, ...] = get_args(RolloutIS)
RolloutRS = Literal["token", "sequence", "geometric"]
ROLLOUT_RS: tuple[RolloutRS, ...] = get_args(RolloutRS)

EngineDtype = Literal["float32", "bfloat16", "float16"]
TrainDtype = Literal["float32", "bfloat16"]
PackedAttention = Literal["sdpa", "flex"]
Strategy = Literal["fsdp2", "fsdp"]
Device = Literal["auto", "cpu", "cuda"]
WeightTransfer = Literal["auto", "store", "ipc", "nccl"]
RolloutOverlap = Literal["off", "one_step"]
ResumeMode = Literal["auto", "disable", "resume_path"]
History = Literal["append", "window"]


# Advantage estimators, each with whether it compares the trajectories of one task. These ship;
# ``register_adv_est`` adds those of users. ``rlvcr`` and ``copo`` are registered by the package
# ``rlvcr``.
ESTIMATORS: dict[str, bool] = {
    "gae": False,
    "grpo": True,
    "rloo": True,
    "reinforce_plus_plus": False,
    "reinforce_plus_plus_baseline": True,
    "remax": False,
    "opo": True,
    "gpg": True,
    "gigpo": True,
    "grpo_passk": True,
    "gdpo": True,
    "graphgpo": True,
    "hgpo": True,
    "rlvcr": True,
    "copo": True,
}
# Public name: ``AdvantageEstimator.GRPO == "grpo"``, for each estimator that ships.
AdvantageEstimator: Any = StrEnum("AdvantageEstimator", [(n.upper(), n) for n in ESTIMATORS])
POLICY_LOSSES = (
    "vanilla",
    "gspo",
    "cispo",
    "sapo",
    "geo_mean",
    "gmpo",
    "gpg",
    "clip_cov",
    "kl_cov",
    "dppo",
    "dppo_tv",
    "dppo_kl",
)
ENGINES = ("vllm", "hf")
# Where metrics go: the terminal, the run directory, and the services of accelerate.
TRACKERS = (
    "console",
    "file",
    "aim",
    "clearml",
    "comet_ml",
    "dvclive",
    "mlflow",
    "swanlab",
    "tensorboard",
    "trackio",
    "wandb",
)
CHECKPOINT_MANIFEST = "manifest.json"  # the file without which a directory is no checkpoint

# Logits held at once, in numbers (N x V); beyond it the head runs in chunks that backward
# recomputes.
MAX_LOGITS = 1 << 27

CPU_CACHE_GB = 1.0  # KV cache of an engine on CPU where none is given, GiB
