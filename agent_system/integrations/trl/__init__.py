"""TRL: ``GRPOEnvTrainer`` trains a policy on a ``MultistepEnv``. Needs the extra ``trl``; loaded on first use."""

import importlib

_HOME = {"GRPOEnvTrainer": "trainer", "full_sequence_batch": "full_sequence", "masked_grpo_loss": "full_sequence"}
__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_HOME[name]}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "trl":
            raise
        raise ImportError(
            f"{name} needs TRL, which is not installed; install the extra: pip install -e '.[trl]'"
        ) from error
    return getattr(module, name)
