"""Settings of LoRA adapters saved by the library peft, read without loading tensors.

Only plain LoRA in safetensors is accepted: engines and training compute ``y = W x + scale * B A x``
with a frozen weight ``W`` and adapter matrices ``A`` and ``B``.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from verl.config.checkpoint_paths import find_checkpoint_to_resume
from verl.config.schema.trainer import TrainerConfig
from verl.names import ENGINE_STATE

# Config keys: further adapters, adapter from which training starts, weights that a sync sends.
ADAPTERS_KEY = "actor_rollout_ref.model.adapters"
START_KEY = "actor_rollout_ref.model.lora_adapter_path"
SYNC_KEY = "actor_rollout_ref.rollout.lora_sync"
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."  # start of the names of tensors in files of peft
# Options of peft that change what an adapter computes, and their values in plain LoRA.
PLAIN_VALUES = (None, False, "none", [], {})
OPTIONS = (
    *("alora_invocation_tokens", "alpha_pattern", "arrow_config", "bias", "fan_in_fan_out"),
    *("kasa_config", "layer_replication", "lora_bias", "modules_to_save", "monteclora_config"),
    *("rank_pattern", "target_parameters", "trainable_token_indices", "use_bdlora", "use_dora"),
    *("use_qalora", "velora_config"),
)
# Initialisations that leave the weights of the model unchanged. Others (PiSSA) also change them.
PLAIN_INITS = (None, True, False, "gaussian", "orthogonal", "eva")
MAX_ALPHA = 1e9  # lora_alpha must be below this value
FLOAT_TYPES = ("F64", "F32", "F16", "BF16")  # names of floating-point dtypes in safetensors files


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """Settings of a LoRA adapter. Its scale is ``alpha / rank``."""

    rank: int
    alpha: float
    modules: tuple[str, ...]  # full names of the adapted modules

    @property
    def target_modules(self) -> list[str]:
        """Return the last parts of the names of the adapted modules, such as ``q_proj``."""
        return sorted({name.rpartition(".")[2] for name in self.modules})


def find_adapter_file(directory: str | Path, name: str) -> Path:
    """Return the path of file ``name`` in an adapter's ``directory``; ``ValueError`` if missing."""
    path = Path(directory).expanduser() / name
    if not path.is_file():
        raise ValueError(f"it does not hold {CONFIG_FILE} and {WEIGHTS_FILE}")
    return path


def read_adapter_settings(directory: str | Path) -> AdapterSettings:
    """Return the settings of the adapter in ``directory``.

    Raises ``ValueError`` if files are missing or damaged, and for adapters other than plain LoRA.
    """
    from safetensors import SafetensorError, safe_open

    weights_file = find_adapter_file(directory, WEIGHTS_FILE)
    try:
        config = json.loads(find_adapter_file(directory, CONFIG_FILE).read_text(encoding="utf-8"))
        with safe_open(weights_file, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            dtypes = {tensor.get_dtype() for tensor in slices.values()}
            shapes = {name: tuple(tensor.get_shape()) for name, tensor in slices.items()}
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise ValueError(f"its files cannot be read: {error}") from error
    rank, alpha = _read_rank_and_alpha(config)
    modules = {name.removeprefix(PEFT_PREFIX).rpartition(".lora_")[0] for name in shapes}
    expected_names = {f"{PEFT_PREFIX}{name}" for name in list_adapter_tensors(modules)}
    if shapes.keys() != expected_names:
        raise ValueError("its tensors are not pairs lora_A and lora_B")
    for name, shape in shapes.items():
        if len(shape) != 2 or shape[0 if ".lora_A." in name else 1] != rank:
            raise ValueError(f"{name} has the shape {list(shape)}, but the rank is {rank}")
    if not modules or not dtypes <= set(FLOAT_TYPES):
        dtype_fault = f"are of {', '.join(sorted(dtypes))}" if dtypes else "are missing"
        raise ValueError(f"its tensors {dtype_fault}, not of {', '.join(FLOAT_TYPES)}")
    return AdapterSettings(rank, alpha, tuple(sorted(modules)))


def find_resumed_adapter(trainer: TrainerConfig) -> tuple[Path, AdapterSettings] | None:
    """Return the checkpoint that a run is to continue from, and the settings of its adapter.

    Return None if the run continues from no checkpoint, or from one without these settings. Files
    are not verified here, so the run may continue from an earlier checkpoint, with equal settings.
    """
    checkpoint = find_checkpoint_to_resume(trainer)
    settings = None if checkpoint is None else read_saved_adapter(checkpoint / "actor")
    return None if checkpoint is None or settings is None else (checkpoint, settings)


def read_saved_adapter(directory: Path) -> AdapterSettings | None:
    """Return the settings of the adapter in ``directory``, the actor or critic of a checkpoint.

    Return None without an adapter, and for checkpoints of earlier versions, which lack the
    settings.
    """
    try:
        record = json.loads((directory / ENGINE_STATE).read_text(encoding="utf-8"))["adapter"]
        peft_config = {"peft_type": "LORA", "r": record["rank"], "lora_alpha": record["alpha"]}
        # Names start with the attribute of PolicyModel or ValueModel that holds the modules.
        modules = (str(name).partition(".")[2] for name in record["modules"])
        return AdapterSettings(*_read_rank_and_alpha(peft_config), tuple(sorted(modules)))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def list_adapter_tensors(modules: Iterable[str]) -> set[str]:
    """Return the names of the tensors (A and B) of a LoRA adapter of ``modules``."""
    return {f"{module}.lora_{matrix_name}.weight" for module in modules for matrix_name in "AB"}


def _read_rank_and_alpha(config: object) -> tuple[int, float]:
    """Return the rank and the alpha for which ``alpha / rank`` is the scale of the adapter.

    With rsLoRA this alpha is ``lora_alpha * sqrt(rank)``. Raises ``ValueError`` unless ``config``
    describes a plain LoRA adapter.
    """
    if not isinstance(config, Mapping) or config.get("peft_type") != "LORA":
        raise ValueError(f"its {CONFIG_FILE} is not that of a LoRA adapter (peft_type: LORA)")
    unsupported = [name for name in OPTIONS if config.get(name) not in PLAIN_VALUES]
    unsupported += ["init_lora_weights"] * (config.get("init_lora_weights") not in PLAIN_INITS)
    unsupported += ["use_rslora"] * (config.get("use_rslora") not in (None, True, False))
    if unsupported:
        raise ValueError(f"it is not plain LoRA: its config sets {', '.join(unsupported)}")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise ValueError(f"its rank is r={rank!r}, not a positive integer")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < MAX_ALPHA:
        raise ValueError(f"its lora_alpha={alpha!r} is not a positive number below {MAX_ALPHA:.0e}")
    return rank, alpha * (rank**0.5 if config.get("use_rslora") else 1.0)
