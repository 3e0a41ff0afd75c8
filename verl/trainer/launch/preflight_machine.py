"""Checks of this machine for a config: devices, writable directories, trackers, Ray cluster."""

import fcntl
import os
import socket
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch

from verl.config.derive import count_engine_gpus_by_node, engines_have_separate_gpus
from verl.config.problems import build_conflict, build_problem
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.settings import Problem, value_at_path
from verl.record.run_dir import LOCK_FILE, RunDirectory
from verl.record.tracking import BUILT_IN_TRACKERS
from verl.single_controller.ray.local import (
    MAX_DISK_STORE_GB,
    OBJECT_STORE_GB,
    find_ray_token_path,
    find_session_directory_problem,
    read_free_shared_memory_gb,
    read_max_store_file_gb,
)

CONNECT_TIMEOUT_S = 5.0  # timeout of a connection to a cluster
DEVICE_KEY = "trainer.device"
RANKS_KEY = "trainer.n_gpus_per_node"
ENGINE_NODES_KEY = "actor_rollout_ref.rollout.nnodes"
RUN_DIR_KEY = "trainer.default_local_dir"
# Directories that get a copy of the trajectories of each training step, or of each validation.
ROLLOUT_COPY_KEYS = ("trainer.rollout_data_dir", "trainer.validation_data_dir")
# Environment variable with which Ray shows all GPUs to every process.
SHOW_ALL_GPUS = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
RAY_JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # environment variable of the driver of a Ray job
MAX_NAME_BYTES = 255  # bytes of the name of a file or directory
PROBE_BYTES = 64 * 1024  # size of the file that is written to test a directory


def find_machine_problems(
    cfg: PPOConfig | SFTConfig, ignores_local_devices: bool = False
) -> Iterator[Problem]:
    """Yield the problems of this machine that prevent the run, such as too few GPUs."""
    if not ignores_local_devices:
        yield from _find_device_problems(cfg)
    yield from _find_directory_problems(cfg)
    yield from _find_run_directory_problems(cfg)
    yield from _find_tracker_problems(cfg)
    if isinstance(cfg, PPOConfig) and not ignores_local_devices:
        yield from _find_gpu_variable_problems(cfg)
        yield from _find_cluster_problems(cfg)
        yield from _find_ray_file_problems(cfg)
        yield from _find_object_store_problems(cfg)


def _find_device_problems(cfg: PPOConfig | SFTConfig) -> Iterator[Problem]:
    """Yield a problem if this machine has too few GPUs. Skip runs that join a cluster."""
    if isinstance(cfg, PPOConfig) and cfg.ray_init.cluster_address:
        return
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = cfg.trainer.device
    if device == "cuda" and not num_gpus:
        why = "PyTorch sees no CUDA device on this machine"
        fix = f"set {DEVICE_KEY}=cpu, or use a machine with a GPU{_format_check_hint(cfg)}"
        yield build_problem(cfg, DEVICE_KEY, why, "cpu or auto", fix, "does_not_fit")
    elif device != "cpu" and 0 < num_gpus < cfg.trainer.n_gpus_per_node:
        why = f"this machine has {num_gpus}"
        fix = f"set {RANKS_KEY}={num_gpus}{_format_check_hint(cfg)}"
        yield build_problem(cfg, RANKS_KEY, why, f"{num_gpus} or fewer", fix, "does_not_fit")
    elif device != "cpu" and num_gpus and isinstance(cfg, PPOConfig):
        num_ranks = cfg.trainer.nnodes * cfg.trainer.n_gpus_per_node
        num_needed_gpus = num_ranks + sum(count_engine_gpus_by_node(cfg))
        if engines_have_separate_gpus(cfg, "cuda") and num_gpus < num_needed_gpus:
            why = (
                f"training ranks and engines need {num_needed_gpus} GPUs, "
                f"but this machine has {num_gpus}"
            )
            allowed = f"at most {num_gpus} GPUs with the ranks"
            fix = "join a cluster (ray_init.address=auto, RAY_ADDRESS), or lower either number"
            yield build_problem(cfg, ENGINE_NODES_KEY, why, allowed, fix, "does_not_fit")


def _find_gpu_variable_problems(cfg: PPOConfig) -> Iterator[Problem]:
    # Ray itself sets the variable in the driver of a Ray job, but not in the workers of the job.
    if RAY_JOB_CONFIG in os.environ:
        return
    variable_value = os.environ.get(SHOW_ALL_GPUS, "")
    is_set = variable_value.lower() in ("1", "true")  # as Ray reads it
    if is_set and cfg.trainer.device != "cpu" and torch.cuda.is_available():
        yield Problem(
            f"{SHOW_ALL_GPUS}={variable_value!r} (environment variable): every engine would use "
            "the first GPU, because Ray then assigns none; allowed: not set; "
            f"fix: unset {SHOW_ALL_GPUS}",
            "conflicting_keys",
        )


def _format_check_hint(cfg: PPOConfig | SFTConfig) -> str:
    """Return how to check a PPO config for a machine with more GPUs, for error messages."""
    if not isinstance(cfg, PPOConfig):
        return ""
    return f"; for another machine: --check --on {cfg.trainer.n_gpus_per_node}xH100"


def _find_directory_problems(cfg: PPOConfig | SFTConfig) -> Iterator[Problem]:
    keys = [RUN_DIR_KEY]
    if isinstance(cfg, PPOConfig):
        keys += ROLLOUT_COPY_KEYS
        yield from _find_shared_directory_problems(cfg)
    for key in keys:
        directory = value_at_path(cfg, key)
        why = directory and find_write_problem(Path(directory))
        if why:
            fix = f"set {key} to a writable directory"
            allowed = "a directory that can be created and written"
            yield build_problem(cfg, key, why, allowed, fix, "not_writable")


def _find_shared_directory_problems(cfg: PPOConfig) -> Iterator[Problem]:
    """Yield a problem for each copy of the trajectories that would replace files of the run."""
    try:
        run_directory = RunDirectory(cfg.trainer.default_local_dir)
        key_by_directory = {
            folder.resolve(): RUN_DIR_KEY
            for folder in (run_directory.rollouts, run_directory.tokens)
        }
        for key in ROLLOUT_COPY_KEYS:
            copy_directory = value_at_path(cfg, key)
            if not copy_directory:
                continue
            directory = Path(copy_directory).expanduser().resolve()
            other_key = key_by_directory.setdefault(directory, key)
            if other_key != key:
                why = f"the run writes files of the same names there ({other_key})"
                allowed = "a directory that has no other trajectories of the run"
                yield build_conflict(cfg, key, why, allowed, f"set {key}=ANOTHER_DIR, or null")
    except (OSError, RuntimeError, ValueError):
        return  # an invalid path, which _find_directory_problems reports


def _find_run_directory_problems(cfg: PPOConfig | SFTConfig) -> Iterator[Problem]:
    """Yield a problem if the run directory has files of other programs, or is in use by a run."""
    lock_file = Path(value_at_path(cfg, RUN_DIR_KEY)) / LOCK_FILE
    try:
        directory = RunDirectory(value_at_path(cfg, RUN_DIR_KEY))
        lock_file = directory.path / LOCK_FILE
        if foreign_file := directory.find_foreign_file():
            why = f"contains {foreign_file}, which no run wrote and this run would replace"
            allowed = "a new directory, or that of a run"
            fix = f"set {RUN_DIR_KEY}=DIR"
            yield build_problem(cfg, RUN_DIR_KEY, why, allowed, fix, "file_exists")
            return
        with lock_file.open(encoding="utf-8", errors="replace") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        lock_holder = lock_file.read_text(encoding="utf-8", errors="replace").strip()
        why = f"the run of process {lock_holder} is using it"
        fix = "wait for that run or end it, or set trainer.experiment_name=ANOTHER"
        allowed = "a directory that no other run uses"
        yield build_problem(cfg, RUN_DIR_KEY, why, allowed, fix, "file_exists")
    except (OSError, RuntimeError, ValueError):
        return  # the directory is new, or invalid, which _find_directory_problems reports


def _find_tracker_problems(cfg: PPOConfig | SFTConfig) -> Iterator[Problem]:
    key = "trainer.logger"
    external_trackers = [name for name in cfg.trainer.logger if name not in BUILT_IN_TRACKERS]
    missing_trackers = [name for name in external_trackers if not find_spec(name)]
    installed_trackers = [name for name in cfg.trainer.logger if name not in missing_trackers]
    for name in missing_trackers:
        why = f"the package of {name} is not installed, so it would get no metrics"
        package = name.replace("_", "-")
        fix = (
            f"run pip install {package}, or set {key}=[{','.join(installed_trackers) or 'console'}]"
        )
        yield build_problem(cfg, key, why, "installed trackers", fix, "missing_package")


def _find_ray_file_problems(cfg: PPOConfig) -> Iterator[Problem]:
    """Yield a problem if a new local Ray cannot write its authentication token or its sessions."""
    if cfg.ray_init.cluster_address:
        return
    session_problem = find_session_directory_problem()
    if session_problem:
        yield Problem(session_problem, "not_writable")
    token_path = find_ray_token_path()
    if token_path is None or token_path.is_file():
        return
    why = find_write_problem(token_path.parent)
    if why:
        setting = f"HOME={str(Path.home())!r}"
        if "RAY_AUTH_TOKEN_PATH" in os.environ:
            setting = f"RAY_AUTH_TOKEN_PATH={str(token_path)!r}"
        yield Problem(
            f"{setting} (environment variable): Ray stores its token there, but {why}; allowed: a "
            "directory that can be created and written; fix: set RAY_AUTH_TOKEN_PATH=FILE, or "
            "another HOME",
            "not_writable",
        )


def find_write_problem(directory: Path) -> str:
    """Return the reason why nothing can be written to ``directory``; "" if it can be."""
    try:
        existing_parent = directory.expanduser().absolute()
        if any(len(os.fsencode(part)) > MAX_NAME_BYTES for part in existing_parent.parts):
            return f"a name in it has more than {MAX_NAME_BYTES} bytes"
        while not existing_parent.exists():
            existing_parent = existing_parent.parent
    # Raised for a name that the file system does not allow, or for ~USER of an unknown user.
    except (OSError, RuntimeError, ValueError) as error:
        return f"{directory} cannot exist: {getattr(error, 'strerror', None) or error}"
    try:
        # Write a file: permission bits do not show that a file system is read-only or full. Do not
        # create the run directory itself.
        with tempfile.TemporaryFile(dir=existing_parent) as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            return ""
    except OSError as error:
        return f"nothing can be written to {existing_parent}: {error.strerror or error}"


def _find_cluster_problems(cfg: PPOConfig) -> Iterator[Problem]:
    """Yield a problem of a run that joins a cluster: no connection, or a relative run directory."""
    address = cfg.ray_init.cluster_address
    if address is None:
        return
    if address != "auto":
        problems = list(_find_connection_problems(cfg.ray_init.address, address))
        yield from problems
        if problems:
            return
    directory = Path(value_at_path(cfg, RUN_DIR_KEY)).expanduser()
    if not directory.is_absolute():
        why = f"the workers of the cluster at {address} start in other directories"
        allowed = "an absolute path on storage that all nodes share"
        fix = f"set {RUN_DIR_KEY}={directory.absolute()}, if all nodes share it"
        yield build_problem(cfg, RUN_DIR_KEY, why, allowed, fix, "invalid_syntax")


def _find_object_store_problems(cfg: PPOConfig) -> Iterator[Problem]:
    key = "ray_init.object_store_gb"
    size_gb = cfg.ray_init.object_store_gb
    free_gb = read_free_shared_memory_gb()
    if size_gb is not None and size_gb > max(free_gb, MAX_DISK_STORE_GB):
        why = f"the shared memory of this machine (/dev/shm) has {free_gb:.1f} GB free"
        allowed = f"at most {max(free_gb, MAX_DISK_STORE_GB):.1f}"
        fix = f"set {key}=null, or enlarge /dev/shm (docker run --shm-size)"
        yield build_problem(cfg, key, why, allowed, fix, "does_not_fit")
    starts_ray = cfg.ray_init.cluster_address is None
    max_file_gb = read_max_store_file_gb()
    if starts_ray and max_file_gb < (size_gb or OBJECT_STORE_GB):
        why = f"Ray's object store is a file, and files are limited to {max_file_gb:.2g} GB"
        allowed = "a limit above the size of the object store"
        yield build_problem(cfg, key, why, allowed, "run `ulimit -f unlimited`", "does_not_fit")


def _find_connection_problems(configured_address: str | None, address: str) -> Iterator[Problem]:
    """Yield a problem if no connection to the cluster at ``address`` is possible."""
    setting = f"RAY_ADDRESS={address!r} (environment variable)"
    address_fix = "unset RAY_ADDRESS"
    if configured_address:
        setting = f"ray_init.address={configured_address!r}"
        address_fix = "set ray_init.address=null"
    fix = f"run `ray start --head` there, or start Ray with the run: {address_fix}"
    allowed = "host:port of a running cluster, or auto for that of this node"
    host, _, port = address.partition("://")[2].rpartition(":")
    if "://" not in address:
        host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        message = f"{setting}: the address is not host:port; allowed: {allowed}; fix: {fix}"
        yield Problem(message, "invalid_syntax")
        return
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        message = f"{setting}: cannot connect: {error}; allowed: {allowed}; fix: {fix}"
        yield Problem(message, "failed_call")
