"""Names that a configuration chooses among, once for the settings and for the code that acts on
them.

Imports no library, so that the settings stay light. What a registry can add to (estimators, policy
losses, engines) is listed here as it ships.
"""

from enum import StrEnum
from typing import Literal, Self, get_args

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


class AdvantageEstimator(StrEnum):
    """Names of the estimators, each with whether it compares the plays of one task; the last two
    are registered when the package ``rlvcr`` is imported.
    """

    compares_group: bool

    def __new__(cls, name: str, compares_group: bool = False) -> Self:
        """The member called ``name``."""
        member = str.__new__(cls, name)
        member._value_ = name
        member.compares_group = compares_group
        return member

    GAE = "gae"
    GRPO = "grpo", True
    RLOO = "rloo", True
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline", True
    REMAX = "remax"
    OPO = "opo", True
    GPG = "gpg", True
    GIGPO = "gigpo", True
    GRPO_PASSK = "grpo_passk", True
    GDPO = "gdpo", True
    GRAPHGPO = "graphgpo", True
    HGPO = "hgpo", True
    RLVCR = "rlvcr", True
    COPO = "copo", True


ESTIMATORS = tuple(name.value for name in AdvantageEstimator)
# Estimators that compare the plays of one task: those above, and what ``register_adv_est`` adds.
COMPARES_GROUP = {name.value for name in AdvantageEstimator if name.compares_group}
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
