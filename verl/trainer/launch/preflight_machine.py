"""What this machine lacks of what a config asks for: devices, places to write to, a cluster."""

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from verl.trainer.config.derive import engine_gpus, have_own_gpus
from verl.trainer.config.problems import problem
from verl.trainer.config.schema import PPOConfig, SFTConfig
from verl.utils.settings import lookup

ANSWER_S = 5.0  # how long a cluster may take to answer
DEVICE = "trainer.device"
RANKS = "trainer.n_gpus_per_node"
ENGINE_NODES = "actor_rollout_ref.rollout.nnodes"
PLACE = "trainer.default_local_dir"


def machine_problems(cfg: PPOConfig | SFTConfig) -> Iterator[str]:
    """Messages of all checks of the machine."""
    yield from _device_problems(cfg)
    yield from _place_problems(cfg)
    if isinstance(cfg, PPOConfig):
        yield from _cluster_problems(cfg)


def _device_problems(cfg: PPOConfig | SFTConfig) -> Iterator[str]:
    """The devices are there; those of a cluster that is joined are its own."""
    if isinstance(cfg, PPOConfig) and (cfg.ray_init.address or os.environ.get("RAY_ADDRESS")):
        return
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = cfg.trainer.device
    if device == "cuda" and not there:
        why = "PyTorch sees no CUDA device here"
        yield problem(cfg, DEVICE, why, "cpu or auto", f"{DEVICE}=cpu, or a machine with a GPU")
    elif device != "cpu" and 0 < there < cfg.trainer.n_gpus_per_node:
        why = f"this machine has {there}"
        yield problem(cfg, RANKS, why, f"{there} or fewer", f"{RANKS}={there}")
    elif device != "cpu" and there and isinstance(cfg, PPOConfig) and have_own_gpus(cfg, "cuda"):
        needed = cfg.trainer.nnodes * cfg.trainer.n_gpus_per_node + sum(engine_gpus(cfg))
        if there < needed:
            why = f"with those of the training ranks {needed} GPUs are needed, and {there} are here"
            fix = "a cluster (ray_init.address=auto, RAY_ADDRESS), or fewer GPUs of either kind"
            yield problem(cfg, ENGINE_NODES, why, f"what is left of {there} GPUs", fix)


def _place_problems(cfg: PPOConfig | SFTConfig) -> Iterator[str]:
    """Where the run writes to can be written."""
    keys = [PLACE]
    if isinstance(cfg, PPOConfig):
        keys += ["trainer.rollout_data_dir", "trainer.validation_data_dir"]
    for key in keys:
        place = lookup(cfg, key)
        why = place and unwritable(Path(place))
        if why:
            fix = f"{key}=DIR, a directory that can be written"
            yield problem(cfg, key, why, "a directory that can be made and written", fix)


def unwritable(directory: Path) -> str:
    """Why nothing can be written to ``directory``; empty where it can."""
    above = directory.expanduser().absolute()
    try:
        while not above.exists():
            above = above.parent
        os.lstat(directory)  # a name that is too long shows here alone
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        return f"{directory} can be no directory: {getattr(error, 'strerror', None) or error}"
    try:
        # Tried, not asked: permissions do not tell of file systems that are read only. Nothing is
        # left of it, and the run's own directory is not made.
        with tempfile.TemporaryDirectory(dir=above):
            return ""
    except OSError as error:
        return f"nothing can be written to {above}: {error.strerror or error}"


def _cluster_problems(cfg: PPOConfig) -> Iterator[str]:
    """A cluster that is to be joined answers, and its nodes can share the run directory."""
    address = cfg.ray_init.address or os.environ.get("RAY_ADDRESS")
    if not address or address == "local":
        return
    silent = [] if address == "auto" else list(_silence(cfg.ray_init.address, address))
    yield from silent or _relative_places(cfg, address)


def _relative_places(cfg: PPOConfig, address: str) -> Iterator[str]:
    """What a run on a cluster leaves has a place that is the same on every node."""
    place = Path(lookup(cfg, PLACE)).expanduser()
    if not place.is_absolute():
        why = f"the workers of the cluster at {address} start in directories of their own"
        allowed = "an absolute path on storage that all nodes share"
        fix = f"{PLACE}={place.absolute()}, if every node sees it"
        yield problem(cfg, PLACE, why, allowed, fix)


def _silence(own: str | None, address: str) -> Iterator[str]:
    """Nobody answers at ``address``, which the config names (``own``) or the environment."""
    said = f"ray_init.address={own!r}" if own else f"RAY_ADDRESS={address!r} (the environment's)"
    fix = "`ray start --head` there, or a Ray of the run's own: " + (
        "ray_init.address=null" if own else "unset RAY_ADDRESS"
    )
    allowed = "host:port of a cluster that runs, or auto for this node's"
    host, _, port = address.partition("://")[2].rpartition(":")
    if "://" not in address:
        host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        yield f"{said}: no host:port; allowed: {allowed}; fix: {fix}"
        return
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_S).close()
    except (OSError, OverflowError) as error:
        yield f"{said}: nobody answers there: {error}; allowed: {allowed}; fix: {fix}"
