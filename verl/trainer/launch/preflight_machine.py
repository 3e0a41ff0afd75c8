"""What this machine lacks of what a config asks for: devices, places to write to, a cluster."""

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

ANSWER_S = 5.0  # how long a cluster may take to answer
DEVICE = "trainer.device"
RANKS = "trainer.n_gpus_per_node"
ENGINE_NODES = "actor_rollout_ref.rollout.nnodes"
PLACE = "trainer.default_local_dir"
# The modules of which a tracker needs one, where they are not called as it is.
TRACKER_MODULES = {"tensorboard": ("tensorboard", "tensorboardX")}
LONGEST_NAME = 255  # of a file or directory, in bytes
NO_SERVICE = ("console", "file")


def machine_problems(cfg: PPOConfig | SFTConfig, elsewhere: bool = False) -> Iterator[str]:
    """Messages of all checks of the machine; ``elsewhere``: but for its devices and its cluster."""
    if not elsewhere:
        yield from _device_problems(cfg)
    yield from _place_problems(cfg)
    yield from _use_problems(cfg)
    yield from _tracker_problems(cfg)
    if isinstance(cfg, PPOConfig) and not elsewhere:
        yield from _cluster_problems(cfg)
        yield from _token_problems(cfg)


def _device_problems(cfg: PPOConfig | SFTConfig) -> Iterator[str]:
    """The devices are there; those of a cluster that is joined are its own."""
    if isinstance(cfg, PPOConfig) and (cfg.ray_init.address or os.environ.get("RAY_ADDRESS")):
        return
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = cfg.trainer.device
    if device == "cuda" and not there:
        why = "PyTorch sees no CUDA device here"
        fix = f"{DEVICE}=cpu, or a machine with a GPU{_check_on(cfg)}"
        yield problem(cfg, DEVICE, why, "cpu or auto", fix)
    elif device != "cpu" and 0 < there < cfg.trainer.n_gpus_per_node:
        why = f"this machine has {there}"
        fix = f"{RANKS}={there}{_check_on(cfg)}"
        yield problem(cfg, RANKS, why, f"{there} or fewer", fix)
    elif device != "cpu" and there and isinstance(cfg, PPOConfig) and have_own_gpus(cfg, "cuda"):
        needed = cfg.trainer.nnodes * cfg.trainer.n_gpus_per_node + sum(engine_gpus(cfg))
        if there < needed:
            why = f"with those of the training ranks {needed} GPUs are needed, and {there} are here"
            fix = "a cluster (ray_init.address=auto, RAY_ADDRESS), or fewer GPUs of either kind"
            yield problem(cfg, ENGINE_NODES, why, f"what is left of {there} GPUs", fix)


def _check_on(cfg: PPOConfig | SFTConfig) -> str:
    """How the config is checked for the machine that it is meant for."""
    if not isinstance(cfg, PPOConfig):
        return ""
    return f"; for another machine: --check --on {cfg.trainer.n_gpus_per_node}xH100"


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


def _use_problems(cfg: PPOConfig | SFTConfig) -> Iterator[str]:
    """No other run holds the run directory (see ``verl.record.run_dir``)."""
    lock = Path(lookup(cfg, PLACE)) / LOCK
    try:
        directory = RunDirectory(lookup(cfg, PLACE))
        lock = directory.path / LOCK
        if foreign := directory.foreign_file():
            why = f"holds {foreign}, which no run wrote and this one would replace"
            allowed = "a new directory, or that of a run"
            yield problem(cfg, PLACE, why, allowed, f"{PLACE}=DIR")
            return
        with lock.open(encoding="utf-8", errors="replace") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = lock.read_text(encoding="utf-8", errors="replace").strip()
        why = f"the run of process {owner} holds it"
        fix = "wait for it or end it, or trainer.experiment_name=ANOTHER"
        yield problem(cfg, PLACE, why, "a directory of its own", fix)
    except (OSError, RuntimeError, ValueError):
        return  # no run was here, or none can be: said of the place


def _tracker_problems(cfg: PPOConfig | SFTConfig) -> Iterator[str]:
    """The services that metrics go to can be reached from here: their packages are installed."""
    key = "trainer.logger"
    missing = [
        name
        for name in cfg.trainer.logger
        if name not in NO_SERVICE and not any(map(find_spec, TRACKER_MODULES.get(name, (name,))))
    ]
    for name in missing:
        left = ",".join(other for other in cfg.trainer.logger if other not in missing)
        why = f"the package of {name} is not installed, and no metric would reach it"
        fix = f"pip install {name.replace('_', '-')}, or {key}=[{left or 'console'}]"
        yield problem(cfg, key, why, "trackers that are installed", fix)


def _token_problems(cfg: PPOConfig) -> Iterator[str]:
    """Ray's token and sessions, of a Ray that the run starts, can be kept."""
    joins = cfg.ray_init.address or os.environ.get("RAY_ADDRESS")
    refusal = "" if joins else directory_refusal()
    if refusal:
        yield refusal
    path = None if joins else token_path()
    if path is None or path.is_file():
        return
    why = unwritable(path.parent)
    if why:
        named = "RAY_AUTH_TOKEN_PATH" in os.environ
        said = f"RAY_AUTH_TOKEN_PATH={str(path)!r}" if named else f"HOME={str(Path.home())!r}"
        yield (
            f"{said} (the environment's): Ray keeps its token there, and {why}; allowed: a "
            "directory that can be made and written; fix: RAY_AUTH_TOKEN_PATH=FILE, or another HOME"
        )


def unwritable(directory: Path) -> str:
    """Why nothing can be written to ``directory``; empty where it can."""
    try:
        above = directory.expanduser().absolute()
        if any(len(os.fsencode(part)) > LONGEST_NAME for part in above.parts):
            return f"a name in it has more than {LONGEST_NAME} bytes"
        while not above.exists():
            above = above.parent
    # A name that no file system takes, or a home that nobody has.
    except (OSError, RuntimeError, ValueError) as error:
        return f"there can be no {directory}: {getattr(error, 'strerror', None) or error}"
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
