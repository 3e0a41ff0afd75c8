"""Checks of this machine for a config: devices, writable directories, trackers, Ray cluster."""

import fcntl
import os
import socket
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch

from verl.config.derive import engine_gpus, have_own_gpus
from verl.config.problems import problem
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.settings import lookup
from verl.record.run_dir import LOCK, RunDirectory
from verl.single_controller.ray.local import directory_refusal, token_path

ANSWER_S = 5.0  # timeout of a connection to a cluster
DEVICE = "trainer.device"
RANKS = "trainer.n_gpus_per_node"
ENGINE_NODES = "actor_rollout_ref.rollout.nnodes"
PLACE = "trainer.default_local_dir"
# Modules of which a tracker needs one, for trackers whose module has another name.
TRACKER_MODULES = {"tensorboard": ("tensorboard", "tensorboardX")}
LONGEST_NAME = 255  # bytes of the name of a file or directory
NO_SERVICE = ("console", "file")


def machine_problems(cfg: PPOConfig | SFTConfig, elsewhere: bool = False) -> Iterator[str]:
    """Yield the problems of this machine; with ``elsewhere`` without its devices and cluster."""
    if not elsewhere:
        yield from _device_problems(cfg)
    yield from _place_problems(cfg)
    yield from _use_problems(cfg)
    yield from _tracker_problems(cfg)
    if isinstance(cfg, PPOConfig) and not elsewhere:
        yield from _cluster_problems(cfg)
        yield from _token_problems(cfg)


def _device_problems(cfg: PPOConfig | SFTConfig) -> Iterator[str]:
    """Yield a problem if this machine has too few GPUs. Skip runs that join a cluster."""
    if isinstance(cfg, PPOConfig) and (cfg.ray_init.address or os.environ.get("RAY_ADDRESS")):
        return
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = cfg.trainer.device
    if device == "cuda" and not gpus:
        why = "PyTorch sees no CUDA device on this machine"
        fix = f"set {DEVICE}=cpu, or use a machine with a GPU{_check_on(cfg)}"
        yield problem(cfg, DEVICE, why, "cpu or auto", fix)
    elif device != "cpu" and 0 < gpus < cfg.trainer.n_gpus_per_node:
        why = f"this machine has {gpus}"
        fix = f"set {RANKS}={gpus}{_check_on(cfg)}"
        yield problem(cfg, RANKS, why, f"{gpus} or fewer", fix)
    elif device != "cpu" and gpus and isinstance(cfg, PPOConfig) and have_own_gpus(cfg, "cuda"):
        needed = cfg.trainer.nnodes * cfg.trainer.n_gpus_per_node + sum(engine_gpus(cfg))
        if gpus < needed:
            why = f"training ranks and engines need {needed} GPUs, but this machine has {gpus}"
            fix = "join a cluster (ray_init.address=auto, RAY_ADDRESS), or lower either number"
            yield problem(cfg, ENGINE_NODES, why, f"at most {gpus} GPUs with the ranks", fix)


def _check_on(cfg: PPOConfig | SFTConfig) -> str:
    """Return the hint how to check the config for another machine; "" for SFT."""
    if not isinstance(cfg, PPOConfig):
        return ""
    return f"; for another machine: --check --on {cfg.trainer.n_gpus_per_node}xH100"


def _place_problems(cfg: PPOConfig | SFTConfig) -> Iterator[str]:
    """Yield a problem for each output directory that cannot be written."""
    keys = [PLACE]
    if isinstance(cfg, PPOConfig):
        keys += ["trainer.rollout_data_dir", "trainer.validation_data_dir"]
    for key in keys:
        directory = lookup(cfg, key)
        why = directory and unwritable(Path(directory))
        if why:
            fix = f"set {key} to a writable directory"
            yield problem(cfg, key, why, "a directory that can be created and written", fix)


def _use_problems(cfg: PPOConfig | SFTConfig) -> Iterator[str]:
    """Yield a problem if the run directory has foreign files, or another run is using it."""
    lock = Path(lookup(cfg, PLACE)) / LOCK
    try:
        directory = RunDirectory(lookup(cfg, PLACE))
        lock = directory.path / LOCK
        if foreign := directory.foreign_file():
            why = f"contains {foreign}, which no run wrote and this run would replace"
            allowed = "a new directory, or that of a run"
            yield problem(cfg, PLACE, why, allowed, f"set {PLACE}=DIR")
            return
        with lock.open(encoding="utf-8", errors="replace") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = lock.read_text(encoding="utf-8", errors="replace").strip()
        why = f"the run of process {owner} is using it"
        fix = "wait for that run or end it, or set trainer.experiment_name=ANOTHER"
        yield problem(cfg, PLACE, why, "a directory that no other run uses", fix)
    except (OSError, RuntimeError, ValueError):
        return  # a new directory, or an invalid one, which _find_directory_problems reports


def _tracker_problems(cfg: PPOConfig | SFTConfig) -> Iterator[str]:
    """Yield a problem for each tracker whose package is not installed."""
    key = "trainer.logger"
    missing = [
        name
        for name in cfg.trainer.logger
        if name not in NO_SERVICE and not any(map(find_spec, TRACKER_MODULES.get(name, (name,))))
    ]
    for name in missing:
        installed = ",".join(other for other in cfg.trainer.logger if other not in missing)
        why = f"the package of {name} is not installed, so it would get no metrics"
        fix = f"run pip install {name.replace('_', '-')}, or set {key}=[{installed or 'console'}]"
        yield problem(cfg, key, why, "installed trackers", fix)


def _token_problems(cfg: PPOConfig) -> Iterator[str]:
    """Yield problems of the directories for the token and sessions of a Ray that the run starts."""
    joins = cfg.ray_init.address or os.environ.get("RAY_ADDRESS")
    refusal = "" if joins else directory_refusal()
    if refusal:
        yield refusal
    path = None if joins else token_path()
    if path is None or path.is_file():
        return
    why = unwritable(path.parent)
    if why:
        has_variable = "RAY_AUTH_TOKEN_PATH" in os.environ
        home = f"HOME={str(Path.home())!r}"
        setting = f"RAY_AUTH_TOKEN_PATH={str(path)!r}" if has_variable else home
        yield (
            f"{setting} (environment variable): Ray stores its token there, but {why}; allowed: a "
            "directory that can be created and written; fix: set RAY_AUTH_TOKEN_PATH=FILE, or "
            "another HOME"
        )


def unwritable(directory: Path) -> str:
    """Return the reason why nothing can be written to ``directory``; "" if it can be."""
    try:
        above = directory.expanduser().absolute()
        if any(len(os.fsencode(part)) > LONGEST_NAME for part in above.parts):
            return f"a name in it has more than {LONGEST_NAME} bytes"
        while not above.exists():
            above = above.parent
    # A name that the file system does not allow, or the home of an unknown user.
    except (OSError, RuntimeError, ValueError) as error:
        return f"{directory} cannot exist: {getattr(error, 'strerror', None) or error}"
    try:
        # Write a temporary directory: permission bits do not show that a file system is read-only.
        # The run directory itself is not created.
        with tempfile.TemporaryDirectory(dir=above):
            return ""
    except OSError as error:
        return f"nothing can be written to {above}: {error.strerror or error}"


def _cluster_problems(cfg: PPOConfig) -> Iterator[str]:
    """Yield problems of the cluster to join: no connection, or a run directory that is relative."""
    address = cfg.ray_init.address or os.environ.get("RAY_ADDRESS")
    if not address or address == "local":
        return
    silent = [] if address == "auto" else list(_silence(cfg.ray_init.address, address))
    yield from silent or _relative_places(cfg, address)


def _relative_places(cfg: PPOConfig, address: str) -> Iterator[str]:
    """Yield a problem if the run directory of a run on a cluster is a relative path."""
    directory = Path(lookup(cfg, PLACE)).expanduser()
    if not directory.is_absolute():
        why = f"the workers of the cluster at {address} start in other directories"
        allowed = "an absolute path on storage that all nodes share"
        fix = f"set {PLACE}={directory.absolute()}, if all nodes share it"
        yield problem(cfg, PLACE, why, allowed, fix)


def _silence(configured: str | None, address: str) -> Iterator[str]:
    """Yield a problem if no connection to the cluster at ``address`` is possible.

    ``configured`` is ``ray_init.address``; None if the address comes from ``RAY_ADDRESS``.
    """
    setting = f"RAY_ADDRESS={address!r} (environment variable)"
    if configured:
        setting = f"ray_init.address={configured!r}"
    fix = "run `ray start --head` there, or start Ray with the run: " + (
        "set ray_init.address=null" if configured else "unset RAY_ADDRESS"
    )
    allowed = "host:port of a running cluster, or auto for that of this node"
    host, _, port = address.partition("://")[2].rpartition(":")
    if "://" not in address:
        host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        yield f"{setting}: the address is not host:port; allowed: {allowed}; fix: {fix}"
        return
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_S).close()
    except (OSError, OverflowError) as error:
        yield f"{setting}: cannot connect: {error}; allowed: {allowed}; fix: {fix}"
