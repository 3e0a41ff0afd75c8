"""``GRPOEnvTrainer``: TRL trains a policy on a ``MultistepEnv``.

Needs the optional dependency ``trl`` (``pip install -e '.[trl]'``), which is imported on first use.
"""

from verl.utils.lazy import make_lazy_exports

_resolve, __all__ = make_lazy_exports(
    __name__,
    {
        "GRPOEnvTrainer": "trainer",
        "build_full_sequence_batch": "full_sequence",
        "masked_grpo_loss": "full_sequence",
    },
)


def __getattr__(name: str):
    try:
        return _resolve(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "trl":
            raise
        raise ImportError(
            f"{name} needs TRL, which is not installed; install the extra: pip install -e '.[trl]'"
        ) from error
