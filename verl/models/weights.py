"""Check that the weights in a model directory match the model that its config describes.

    files ──▶ names and shapes ──▶ values

Files are checked for completeness. transformers compares names and shapes, because it knows how
checkpoints map to models. It loads on ``meta``, which reads only headers. Before a run starts, at
most about ``SCANNED_BYTES`` of values are checked for NaN and infinity. When a worker loads the
model, all values are checked.
"""

import contextlib
import json
import logging
import math
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError, safe_open

from verl.models.auto_class import choose_auto_class

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedConfig

logger = logging.getLogger(__name__)
# Kind of model that the weights are loaded for. For ``value`` the output head in the files is
# ignored. For ``reward`` all heads are ignored that the model class does not have.
WeightPurpose = Literal["policy", "value", "reward"]
SCANNED_BYTES = 8 * 2**30  # maximum bytes checked before a run starts, which takes seconds
SAMPLE_BLOCK_BYTES = 64 * 2**20  # a sample takes the first part of each block of this size
MAX_SHOWN_NAMES = 3  # largest number of tensor names in an error message
INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
LFS_POINTER_START = b"version https://git-lfs.github.com"
# Prefixes of files that neither transformers nor vLLM reads as weights of the model.
IGNORED_FILE_PREFIXES = ("adapter_model", "consolidated")
EXPECTED_WEIGHTS = "complete, finite weights of the model that config.json describes"


class UnusableWeightsError(ValueError):
    """Error for weights that are damaged or do not match the config in their directory."""


def check_weights(
    directory: str | Path,
    config: "PreTrainedConfig",
    *,
    setting: str = "",
    purpose: WeightPurpose = "policy",
    trust_remote_code: bool = False,
    should_check_values: bool = True,
) -> None:
    """Raise ``UnusableWeightsError`` unless ``directory`` has the weights of ``config``.

    Raise ``UnsupportedArchitectureError`` if transformers has no language model for ``config``. No
    model is loaded. The error message starts with ``setting`` (``key=value``). With
    ``should_check_values=False`` only the headers of the files are read.
    """
    directory = Path(directory)
    setting = setting or f"model path={str(directory)!r}"
    files = check_weight_files(directory, setting)
    options = {"config": config, "trust_remote_code": trust_remote_code}
    if purpose != "reward":
        choose_auto_class(config)  # raises an error if there is no language model
    try:
        model, loading_info = _from_pretrained(directory, purpose, device_map="meta", **options)
    except Exception as error:  # invalid values of config.json raise errors of many types
        why = f"transformers cannot read its weights: {first_line(error)}"
        raise _unusable_error(setting, why) from error
    _check_names(model, loading_info, setting, purpose)
    _check_dtypes(model, files, setting)
    if purpose == "policy" and _has_untied_embeddings(model):
        _check_tied_values(model, files, setting)
    if should_check_values:
        _require_finite_values(files, setting)


def has_comparable_weight_names(config: "PreTrainedConfig") -> bool:
    """Return True if transformers can load the weights, so that their names can be compared."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    is_known_class = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or hasattr(config, "auto_map")
    return is_known_class and getattr(config, "quantization_config", None) is None


def load_weights(
    directory: str | Path, purpose: WeightPurpose = "policy", **options: Any
) -> Any:  # the type depends on the auto class of transformers
    """Load the model in ``directory`` by transformers, with the keyword arguments ``options``.

    ``options`` must include ``config``, except for a reward model. Raises ``UnusableWeightsError``
    if a tensor is missing, unexpected, of a wrong shape or not finite.
    """
    setting = f"model path={str(directory)!r}"
    files = check_weight_files(Path(directory), setting)
    model, loading_info = _from_pretrained(directory, purpose, **options)
    _check_names(model, loading_info, setting, purpose)
    _check_dtypes(model, files, setting)
    if purpose == "policy" and _has_untied_embeddings(model):
        raise _make_untied_weights_error(model, setting)
    _refuse_non_finite(find_non_finite(model.named_parameters()), setting)
    return model


def disable_weight_rescaling(config: "PreTrainedConfig") -> None:
    """Prevent RWKV models from dividing weights in place at their first pass.

    The trainer sends and saves these weights. Their receiver would divide them again.
    """
    if hasattr(config, "rescale_every"):
        config.rescale_every = 0


def _from_pretrained(
    directory: str | Path, purpose: WeightPurpose, **options: Any
) -> tuple[Any, dict[str, Any]]:
    """Load the model by an auto class; return it and the loading report of transformers."""
    from transformers import AutoModelForSequenceClassification

    auto_class: Any = AutoModelForSequenceClassification
    if purpose != "reward":
        auto_class = choose_auto_class(options["config"])
    # local_files_only, because files of the hub were downloaded before the workers started.
    with quiet_transformers(show_warnings=False):
        return auto_class.from_pretrained(
            directory,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # _check_names reports wrong sizes and other problems
            output_loading_info=True,
            **options,
        )


def find_non_finite(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Return the names of the tensors that hold NaN or infinity."""
    return [name for name, tensor in tensors if not _is_finite(tensor)]


def _is_finite(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.element_size() == 1:  # float8 has no aminmax kernel
        tensor = tensor.float()
    # A NaN makes minimum and maximum NaN. aminmax makes no copy of the tensor.
    lowest_value, highest_value = torch.aminmax(tensor.detach())
    return bool(torch.isfinite(lowest_value) & torch.isfinite(highest_value))


# ---------------------------------------------------------------------- files


def check_weight_files(directory: Path, setting: str) -> list[Path]:
    """Return the files that hold the weights in ``directory``.

    Raises ``UnusableWeightsError`` if a file is missing, truncated or not a weight file, and if
    transformers and vLLM would read different files.
    """
    if (directory / "adapter_config.json").is_file():
        why = "it holds LoRA adapters (adapter_config.json), which are loaded on another model"
        raise _unusable_error(setting, why, "merge them into their model (main_export lora=merged)")
    files = _find_weight_files(directory, setting)
    for file in files:
        _check_file(file, setting)
    if files[0].name != "model.safetensors" and files[0].suffix == ".safetensors":
        _check_index(directory / INDEX_FILES[0], files, setting)
    other_files = [
        file.name
        for file in sorted(directory.glob("*.safetensors"))
        if file not in files and not file.name.startswith(IGNORED_FILE_PREFIXES)
    ]
    if other_files and files[0].name == "model.safetensors":
        why = (
            f"it holds model.safetensors and {_join_names(other_files)}: transformers would read "
            "only the first, vLLM all of them"
        )
        raise _unusable_error(setting, why, "remove the files that do not belong to the model")
    return files


def _find_weight_files(directory: Path, setting: str) -> list[Path]:
    """Return the weight files that transformers would read: one file, or shards with an index."""
    safetensors_file, torch_file = directory / "model.safetensors", directory / "pytorch_model.bin"
    for single_file, index in ((safetensors_file, INDEX_FILES[0]), (torch_file, INDEX_FILES[1])):
        if single_file.is_file():
            return [single_file]
        if (directory / index).is_file():
            return _list_indexed_shards(directory / index, setting)
    partial_files = sorted(
        {
            file.name
            for pattern in ("*.safetensors*", "pytorch_model*", "*.incomplete", "*.part", "*.gguf")
            for file in directory.glob(pattern)
        }
    )
    why = "it holds no weights (model.safetensors, or shards with an index)"
    if partial_files:
        why += f", only {_join_names(partial_files)}"
    raise _unusable_error(setting, why, "complete the download")


def _list_indexed_shards(index: Path, setting: str) -> list[Path]:
    try:
        shard_names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        shards = sorted({str(name) for name in shard_names})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{index.name} lists no shards{_describe_lfs_pointer(index)}: {first_line(error)}"
        raise _unusable_error(setting, why) from error
    missing_shards = [name for name in shards if not (index.parent / name).is_file()]
    if missing_shards or not shards:
        missing_description = (
            f"{len(missing_shards)} of {len(shards)} shards of {index.name} are missing"
        )
        raise _unusable_error(setting, f"{missing_description}: {_join_names(missing_shards)}")
    return [index.parent / name for name in shards]


def _check_index(index: Path, shards: Sequence[Path], setting: str) -> None:
    """Raise ``UnusableWeightsError`` unless each tensor is only in its shard in ``index``."""
    weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    listed_tensors = {(name, index.parent / str(shard)) for name, shard in weight_map.items()}
    stored_tensors = set()
    for shard in shards:
        with safe_open(shard, "pt") as opened_file:
            stored_tensors |= {(name, shard) for name in opened_file.keys()}  # noqa: SIM118
    different_names = sorted({name for name, _ in listed_tensors ^ stored_tensors})
    if different_names:
        fault = f"{index.name} and its shards list different tensors (mixed versions of the model?)"
        raise _unusable_error(setting, _describe_tensors(fault, different_names))


def _check_file(file: Path, setting: str) -> None:
    lfs_description = _describe_lfs_pointer(file)
    if lfs_description:
        raise _unusable_error(
            setting, f"{file.name} holds no weights{lfs_description}", "git lfs pull"
        )
    if file.suffix != ".safetensors":
        return
    try:
        with safe_open(file, "pt"):  # compares the offsets in the header with the file size
            pass
    except (OSError, SafetensorError) as error:
        size = file.stat().st_size
        why = f"{file.name} is truncated or damaged ({size:,} bytes): {first_line(error)}"
        raise _unusable_error(setting, why) from error


def _describe_lfs_pointer(file: Path) -> str:
    with file.open("rb") as stream:
        is_lfs_pointer = stream.read(len(LFS_POINTER_START)) == LFS_POINTER_START
    return ": it is a git-lfs pointer whose content was not downloaded" if is_lfs_pointer else ""


# ---------------------------------------------------------------------- names and shapes


def _check_names(
    model: Any, loading_info: Mapping[str, Any], setting: str, purpose: WeightPurpose
) -> None:
    """Raise ``UnusableWeightsError`` for missing, unexpected or mismatched weights."""
    backbone_prefix = f"{model.base_model_prefix}."
    backbone_prefixes = (
        backbone_prefix,
        *(f"{name}." for name, _ in model.base_model.named_children()),
    )
    missing_names = sorted(loading_info["missing_keys"])
    unexpected_names = sorted(loading_info["unexpected_keys"])
    mismatched_shapes = sorted(loading_info["mismatched_keys"], key=lambda entry: entry[0])
    if purpose == "value":  # a value model has a new scalar head instead of the output head
        missing_names = [name for name in missing_names if name.startswith(backbone_prefix)]
        mismatched_shapes = [
            entry for entry in mismatched_shapes if entry[0].startswith(backbone_prefix)
        ]
    if purpose != "policy":
        unexpected_names = [name for name in unexpected_names if name.startswith(backbone_prefixes)]
    shape_descriptions = [
        f"{name} {list(file_shape)} instead of {list(model_shape)}"
        for name, file_shape, model_shape in mismatched_shapes
    ]
    names_by_problem = {
        "missing": missing_names,
        "unexpected": unexpected_names,
        "of another shape": shape_descriptions,
    }
    reasons = [
        _describe_tensors(problem, names) for problem, names in names_by_problem.items() if names
    ]
    reasons += [first_line(error) for error in loading_info.get("error_msgs", ())]
    architectures = model.config.architectures
    if purpose == "policy" and architectures and type(model).__name__ not in architectures:
        reasons.append(f"vLLM would load architectures={architectures!r} of its config.json")
    if reasons:
        model_description = f"{type(model).__name__} (model_type {model.config.model_type})"
        raise _unusable_error(
            setting, f"not the weights of a {model_description}: {', '.join(reasons)}"
        )


def _check_dtypes(model: Any, files: Sequence[Path], setting: str) -> None:
    """Raise ``UnusableWeightsError`` for parameters that are stored as integers or booleans."""
    if getattr(model.config, "quantization_config", None) is not None:
        return
    parameter_names = {name for name, _ in model.named_parameters()}
    non_float_names = [
        name
        for name, tensor in _iterate_tensors(files)
        if not _is_floating_point(tensor)
        and not parameter_names.isdisjoint((name, f"{model.base_model_prefix}.{name}"))
    ]
    if non_float_names:
        why = _describe_tensors("not stored as floating-point numbers", non_float_names)
        raise _unusable_error(setting, why)


def _is_floating_point(tensor: Any) -> bool:
    """Return True for a tensor, or slice object of a safetensors file, of floats."""
    if isinstance(tensor, torch.Tensor):
        return tensor.is_floating_point()
    return tensor.get_dtype().startswith(("F", "BF"))


def _has_untied_embeddings(model: Any) -> bool:
    """Return True if the config ties output head and embedding, but they are separate weights."""
    if not getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        return False
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    return head is not None and head.weight is not embeddings.weight


def _check_tied_values(model: Any, files: Sequence[Path], setting: str) -> None:
    """Raise ``UnusableWeightsError`` if the output head in the files differs from the embedding.

    The config ties the two. transformers cannot compare their values on ``meta``.
    """
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    names_by_weight_id = {
        id(weight): name for name, weight in model.named_parameters(remove_duplicate=False)
    }
    layer_names = [
        names_by_weight_id[id(layer.weight)].rpartition(".")[0] for layer in (head, embeddings)
    ]
    name_endings = tuple(f"{layer_name.rpartition('.')[2]}.weight" for layer_name in layer_names)
    tied_tensors = {
        ending: tensor
        for name, tensor in _iterate_tensors(files)
        for ending in name_endings
        if name == ending or name.endswith(f".{ending}")
    }
    if len(tied_tensors) == len(name_endings):
        head_weight, embedding_weight = (tensor[:] for tensor in tied_tensors.values())
        if head_weight.shape != embedding_weight.shape or not torch.equal(
            head_weight, embedding_weight
        ):
            raise _make_untied_weights_error(model, setting)


def _make_untied_weights_error(model: object, setting: str) -> UnusableWeightsError:
    why = (
        f"config.json ties the output head of the {type(model).__name__} to its embedding "
        "(tie_word_embeddings), but the files hold two different weights: transformers would use "
        "both, vLLM only the embedding"
    )
    return _unusable_error(setting, why, "set tie_word_embeddings to false in its config.json")


@contextlib.contextmanager
def quiet_transformers(show_warnings: bool = True) -> Iterator[None]:
    """Hide the progress bars of transformers, which every worker process would print.

    With ``show_warnings=False`` the warnings of transformers about weights are hidden too. The
    checks of this module raise errors for the same problems.
    """
    from transformers.utils import logging as hf_logging

    had_progress_bar = hf_logging.is_progress_bar_enabled()
    previous_verbosity = hf_logging.get_verbosity()
    hf_logging.disable_progress_bar()
    if not show_warnings:
        hf_logging.set_verbosity_error()
    try:
        yield
    finally:
        hf_logging.set_verbosity(previous_verbosity)
        if had_progress_bar:
            hf_logging.enable_progress_bar()


# ---------------------------------------------------------------------- values


def _require_finite_values(files: Sequence[Path], setting: str) -> None:
    """Raise ``UnusableWeightsError`` if a weight in ``files`` is NaN or infinite.

    For models above ``SCANNED_BYTES`` an evenly spaced sample of the values is read.
    """
    total_bytes = sum(file.stat().st_size for file in files)
    scanned_fraction = min(1.0, SCANNED_BYTES / max(total_bytes, 1))
    if scanned_fraction < 1.0:
        log_message = "%s: %.0f%% of its weights are checked for NaN and infinity before the start"
        logger.info(log_message, setting, 100 * scanned_fraction)
    non_finite_names = [
        name
        for name, tensor in _iterate_tensors(files)
        if not all(map(_is_finite, _sample_values(tensor, scanned_fraction)))
    ]
    _refuse_non_finite(sorted(non_finite_names), setting)


def _refuse_non_finite(names: Sequence[str], setting: str) -> None:
    if names:
        raise _unusable_error(setting, _describe_tensors("not finite (NaN or infinity)", names))


def _iterate_tensors(files: Sequence[Path]) -> Iterator[tuple[str, Any]]:
    """Yield names and tensors of ``files``; those of safetensors are read when they are indexed."""
    for file in files:
        if file.suffix != ".safetensors":
            is_zip = zipfile.is_zipfile(file)
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)
            yield from state.items()
            continue
        with safe_open(file, "pt") as opened_file:
            for name in opened_file.keys():  # noqa: SIM118  it is no mapping
                yield name, opened_file.get_slice(name)


def _sample_values(tensor: Any, scanned_fraction: float) -> Iterator[torch.Tensor]:
    """Yield evenly spaced parts of ``tensor``, together the fraction ``scanned_fraction`` of it."""
    shape = list(tensor.shape if isinstance(tensor, torch.Tensor) else tensor.get_shape())
    if not shape:
        yield tensor[...] if isinstance(tensor, torch.Tensor) else tensor[:]
        return
    rows_per_block = max(1, SAMPLE_BLOCK_BYTES // max(1, 4 * math.prod(shape[1:])))
    for start_row in range(0, shape[0], rows_per_block):
        yield tensor[
            start_row : min(shape[0], start_row + math.ceil(rows_per_block * scanned_fraction))
        ]


# ---------------------------------------------------------------------- messages


def _unusable_error(
    setting: str, why: str, fix: str = "restore or download the directory again"
) -> UnusableWeightsError:
    return UnusableWeightsError(f"{setting}: {why}; allowed: {EXPECTED_WEIGHTS}; fix: {fix}")


def _describe_tensors(fault: str, names: Sequence[str]) -> str:
    return f"{fault}: {len(names)} tensor{'s' * (len(names) != 1)} ({_join_names(names)})"


def _join_names(names: Sequence[str]) -> str:
    count_suffix = (
        f", and {len(names) - MAX_SHOWN_NAMES} more" if len(names) > MAX_SHOWN_NAMES else ""
    )
    return ", ".join(names[:MAX_SHOWN_NAMES]) + count_suffix


def first_line(error: object) -> str:
    """Return the first line of the message of ``error``."""
    text = str(error).strip() or repr(error)
    return text.splitlines()[0]
