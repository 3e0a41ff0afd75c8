"""The PPO framework: data protocol, worker groups, FSDP2 engines, rollout engines and the trainers.

``verl.DataProto`` is resolved on first use, so that importing the configuration packages stays free of torch.
"""

__version__ = "0.1.0"
__all__ = ["DataProto", "__version__"]


def __getattr__(name: str):
    if name == "DataProto":
        from verl.protocol import DataProto

        return DataProto
    raise AttributeError(f"module 'verl' has no attribute {name!r}")
