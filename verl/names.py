"""Names that a configuration chooses among, once for the settings and for the code that acts on them.

Imports nothing, so that the settings stay light. What a registry can add to (estimators, policy
losses, engines) is listed here as it ships.
"""

from typing import Literal, get_args

LossAggMode = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]
LOSS_AGG_MODES: tuple[LossAggMode, ...] = get_args(LossAggMode)

KLEstimator = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]
KL_ESTIMATORS: tuple[KLEstimator, ...] = get_args(KLEstimator)

NormMode = Literal["mean_norm", "mean_std_norm"]
NORM_MODES: tuple[NormMode, ...] = get_args(NormMode)

EngineDtype = Literal["float32", "bfloat16", "float16"]
TrainDtype = Literal["float32", "bfloat16"]
Strategy = Literal["fsdp2", "fsdp"]
Device = Literal["auto", "cpu", "cuda"]
ResumeMode = Literal["auto", "disable", "resume_path"]
History = Literal["append", "window"]

# Estimators that compare the plays of one task, and those that do not.
GROUP_ESTIMATORS = (
    "grpo",
    "gigpo",
    "rloo",
    "reinforce_plus_plus_baseline",
    "opo",
    "gpg",
)
ESTIMATORS = ("gae", *GROUP_ESTIMATORS, "reinforce_plus_plus", "remax")
POLICY_LOSSES = ("vanilla",)
ENGINES = ("vllm", "hf")

MAX_LOGITS = 1 << 27  # logits that are held at once; longer rows are scored in pieces
