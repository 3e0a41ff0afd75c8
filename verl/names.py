"""Names that a configuration can choose, shared by the schema and the code that implements them.

This module imports no library, so that the schema loads fast. Registries can add estimators, policy
losses and engines; the built-in ones are listed here.
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

# Normalisation of the values of a group: subtract their mean, or also divide by their standard
# deviation.
NormMode = Literal["mean_norm", "mean_std_norm"]
NORM_MODES: tuple[NormMode, ...] = get_args(NormMode)

# Unit over which the seq-mean modes of ``LossAggMode`` average: a row, or all rows of a trajectory.
RowWeight = Literal["row", "trajectory"]

# Rejection sampling in the correction of the mismatch of trainer and engine. It excludes tokens by
# their ratio, or sequences by the product or the geometric mean of their tokens' ratios.
RolloutRS = Literal["token", "sequence", "geometric"]

EngineDtype = Literal["float32", "bfloat16", "float16"]
TrainDtype = Literal["float32", "bfloat16"]
PackedAttention = Literal["sdpa", "flex"]
PrefixTree = Literal["auto", True, False]
Strategy = Literal["fsdp2", "fsdp"]
Device = Literal["auto", "cpu", "cuda"]
WeightTransfer = Literal["auto", "store", "ipc", "nccl"]
LoraSync = Literal["auto", "adapter", "merged"]
RolloutOverlap = Literal["off", "one_step"]
ResumeMode = Literal["auto", "disable", "resume_path"]
# Form of earlier turns in a prompt: one growing token list, the last turns as text in one message,
# or messages that the chat template renders again for each turn.
History = Literal["append", "window", "chat"]

# Models that a sampling request can name: the trained policy, and its base model without LoRA.
POLICY_MODEL = "policy"
BASE_MODEL = "base"


# Built-in advantage estimators -> True if the estimator compares trajectories of one task. It then
# needs several trajectories per task. The package ``rlvcr`` registers ``rlvcr``, ``copo`` and
# ``level_groups``. Users register their estimators with ``register_adv_est``.
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
    "level_groups": True,
}
# Enum that user code imports. Each built-in estimator is a member; AdvantageEstimator.GRPO is
# "grpo".
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
# Destinations of metrics: the terminal, the run directory, and the trackers of accelerate.
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
# Environment variable of rank 0 with the file descriptor of the rendezvous socket.
LISTEN_FD_VARIABLE = "VERL_MASTER_LISTEN_FD"
ENGINE_STATE = "engine.json"  # file with the steps and LoRA settings of a model in a checkpoint
CHECKPOINT_MANIFEST = "manifest.json"  # file that marks a directory as a complete checkpoint

# Maximum number of logits in memory at once (tokens x vocabulary size). For more logits, the output
# layer runs in chunks, which are recomputed in the backward pass.
MAX_LOGITS = 1 << 27

# Largest share of padding tokens in a row-wise forward pass. Sequences that would need more padding
# are computed in separate passes.
MAX_PADDING = 0.25
# ``prefix_tree=auto`` merges rows (computes shared prefixes once) if this leaves at most this share
# of their tokens. Above it, the tree needs so many small attention calls that little time is saved.
MAX_TREE_SHARE = 0.9

CPU_CACHE_GB = 1.0  # default KV cache of an engine on CPU, GiB
