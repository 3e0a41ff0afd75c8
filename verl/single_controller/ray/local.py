"""Start of Ray: on this machine with the loopback interface only, or by joining a given cluster.

Behaviour of Ray 2.60, and how this module changes it:

* Ray turns ``_node_ip_address="127.0.0.1"`` into the machine's external address on Linux, and its
  servers then listen on every interface. With ``RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0`` the node's
  address stays 127.0.0.1 and all servers bind to it.
* Token authentication is on unless ``RAY_AUTH_MODE`` disables it, but Ray writes a token file that
  all users can read. This module writes the file first, readable only by its owner.
* All users can write to Ray's session directories (logs, sockets). This module puts them into a
  directory that only the owner can enter.
"""

import contextlib
import logging
import math
import os
import resource
import secrets
import shutil
import signal
import socket
import stat
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

from verl.config.schema.trainer import RayInitConfig
from verl.config.settings.errors import ConfigError
from verl.utils.processes import ARENAS_VARIABLE, find_processes_by_variable, wait_and_kill
from verl.utils.stacks import STACKS_DIR

LOOPBACK_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
OBJECT_STORE_GB = 1.0  # default size of Ray's object store
# Largest object store that Ray puts on the disk if it exceeds the free shared memory. Ray does not
# start with a larger one.
MAX_DISK_STORE_GB = 10.0
STORE_FILE_OVERHEAD_BYTES = 2**20  # Ray's file is about 80 kB larger than its object store
# The directory is in /tmp and not in TMPDIR, because the path of a socket in it is limited to 107
# characters.
PRIVATE_DIRECTORY = Path(f"/tmp/verl-{os.getuid()}")
KEPT_SESSIONS = 3  # number of ended Ray sessions whose directories are not removed
STOP_TIMEOUT_S = 5.0  # maximum time in which Ray's processes can end by themselves
# Environment variable of all processes of a local Ray: process id of the driver that started it.
RAY_OWNER = "VERL_RAY_OWNER"
# Parts of the messages of Ray's exceptions if its processes start too slowly.
START_TIMEOUT_TEXTS = ("timed out during startup", "Failed to connect to GCS")
# Environment variables that workers on other nodes get from this process.
FORWARDED_VARIABLES = (STACKS_DIR, ARENAS_VARIABLE)

logger = logging.getLogger(__name__)


def init_ray(section: RayInitConfig | None = None, **overrides: object) -> dict[str, Any]:
    """Start Ray, or join the cluster at ``address`` (default: the environment's ``RAY_ADDRESS``).

    ``section`` is the section ``ray_init`` of the configuration; ``overrides`` take precedence over
    its values. If Ray is already initialised in this process, it is not changed.

    Returns ``address``, ``started`` (true for a new local Ray), ``num_cpus`` and ``num_gpus``.
    """
    options = (section or RayInitConfig()).with_values(overrides)
    address = options.cluster_address
    is_local = address is None
    if is_local:
        _prefer_loopback()
    import ray  # imported here: _prefer_loopback sets a variable that Ray reads at import

    if ray.is_initialized():
        return _collect_ray_facts(ray, is_started=False)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray's default gives its workers a lower priority than all other processes.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Ray's default ends a worker that does not start within 60 s, for example if other processes
    # use all CPUs. The call that needs the worker may then wait for hours.
    os.environ.setdefault("RAY_worker_register_timeout_seconds", "600")
    # Ray's default keeps a record of 3 kB of each call, up to 100,000 calls, for its dashboard.
    os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
    # Ray would log the path of the token file at every start. Hide it: the returned dict has it.
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    _protect_ray_token(should_create=is_local)
    ray_arguments = {"logging_level": logging.WARNING, "log_to_driver": options.log_to_driver}
    runtime_env = dict(options.runtime_env)
    if not is_local:
        # Workers on other nodes do not inherit the environment of this process.
        forwarded_values = {
            name: os.environ[name] for name in FORWARDED_VARIABLES if name in os.environ
        }
        if forwarded_values:
            runtime_env["env_vars"] = forwarded_values | runtime_env.get("env_vars", {})
    if runtime_env:
        ray_arguments["runtime_env"] = runtime_env
    if is_local:
        ray_arguments |= _prepare_local_start(options)
    try:
        with keep_sigterm_handler():
            if is_local:
                _start_local_ray(ray_arguments)
            else:
                ray.init(address=address, **ray_arguments)
    finally:
        os.environ.pop(RAY_OWNER, None)
    _protect_ray_token(should_create=False)
    node_ip = ray.util.get_node_ip_address()
    if is_local and not node_ip.startswith("127."):
        logger.warning("Ray listens on %s, not only on the loopback interface", node_ip)
    return _collect_ray_facts(ray, is_started=is_local)


@contextlib.contextmanager
def keep_sigterm_handler() -> Iterator[None]:
    """Keep this process's SIGTERM handler, if there is one, while the ``with`` block starts Ray.

    Ray's handlers end the process without a message, or after up to 30 s. While Ray connects (about
    a second), its native handler cannot be replaced. A SIGTERM then aborts the process.
    """
    import ray._private.utils as ray_utils

    previous_handler = signal.getsignal(signal.SIGTERM)
    # None stands for a handler that was not installed from Python and cannot be restored.
    is_kept = previous_handler not in (None, signal.SIG_DFL)
    if not is_kept or threading.current_thread() is not threading.main_thread():
        yield
        return
    set_sigterm_handler = ray_utils.set_sigterm_handler
    ray_utils.set_sigterm_handler = lambda _handler: None
    try:
        yield
    finally:
        ray_utils.set_sigterm_handler = set_sigterm_handler
        signal.signal(signal.SIGTERM, previous_handler)  # Ray's native code replaced it


def _prepare_local_start(options: RayInitConfig) -> dict[str, Any]:
    """Prepare directory and environment of a local Ray, and return arguments for ``ray.init``."""
    error_message = find_session_directory_problem()
    if error_message:
        raise ConfigError(error_message, "not_writable")
    PRIVATE_DIRECTORY.mkdir(mode=0o700, exist_ok=True)
    PRIVATE_DIRECTORY.chmod(0o700)
    sessions_directory = PRIVATE_DIRECTORY / "ray"
    remove_stale_sessions(sessions_directory)
    os.environ[RAY_OWNER] = str(os.getpid())  # Ray's processes inherit it
    return {
        "num_cpus": options.num_cpus,
        "num_gpus": options.num_gpus,
        "object_store_memory": int((options.object_store_gb or OBJECT_STORE_GB) * 1e9),
        "include_dashboard": False,
        "_node_ip_address": "127.0.0.1",
        "_temp_dir": str(sessions_directory),
    }


def _start_local_ray(ray_arguments: Mapping[str, Any]) -> None:
    """Start a local Ray, and start it again if other processes delayed it beyond Ray's limit."""
    import ray

    try:
        ray.init(address="local", **ray_arguments)
    except Exception as error:  # Ray has no class for this error
        if not any(text in str(error) for text in START_TIMEOUT_TEXTS):
            raise
        logger.warning(
            "Ray did not start within its time limit. Other processes may use all CPUs. Ray is "
            "started again."
        )
        stop_ray()
        ray.init(address="local", **ray_arguments)


def read_free_shared_memory_gb() -> float:
    """Return the GB of shared memory that Ray's object store can use; 0.0 if there is none."""
    try:
        return shutil.disk_usage("/dev/shm").free / 1e9
    except OSError:
        return 0.0


def limit_object_store_size(store_gb: float) -> float:
    """Return ``store_gb``, reduced to what this machine permits, but not below the default.

    Ray writes objects to the disk if its object store is full. It does not start if the store would
    take the memory that tasks and actors need, or exceed the limit of file sizes.
    """
    # Leave a tenth: other processes may use shared memory until Ray reads the free size.
    shared_memory_gb = 0.9 * read_free_shared_memory_gb()
    memory_gb = psutil.virtual_memory().available / 1e9
    size_limit_gb = min(shared_memory_gb, memory_gb / 2, read_max_store_file_gb())
    return min(store_gb, max(OBJECT_STORE_GB, size_limit_gb))


def read_max_store_file_gb() -> float:
    """Return the largest object store that the limit of file sizes (``ulimit -f``) permits, in GB.

    Ray's object store is one file. Beyond the limit the kernel kills Ray's process without a
    message.
    """
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit_bytes == resource.RLIM_INFINITY:
        return math.inf
    return (limit_bytes - STORE_FILE_OVERHEAD_BYTES) / 1e9


def stop_ray() -> None:
    """Stop Ray, and kill the processes of a local Ray that do not end in ``STOP_TIMEOUT_S``.

    Ray kills its node process after a second, and the workers of that node then run on until their
    connection times out. Workers of a cluster are not killed.
    """
    import ray

    ray.shutdown()
    processes = find_processes_by_variable(RAY_OWNER, str(os.getpid()))
    for process in wait_and_kill(processes, STOP_TIMEOUT_S):
        logger.info(
            "a process of Ray did not end within %g s and was killed: %d",
            STOP_TIMEOUT_S,
            process.pid,
        )


def _prefer_loopback() -> None:
    os.environ[LOOPBACK_VARIABLE] = "0"
    ray_constants = sys.modules.get("ray._private.ray_constants")
    if ray_constants is not None:  # Ray was imported before the environment variable was set
        setattr(ray_constants, "ENABLE_RAY_CLUSTER", False)  # noqa: B010  for the type checker


def find_session_directory_problem() -> str:
    """Return an error message if ``PRIVATE_DIRECTORY`` cannot be used, else ""."""
    try:
        directory_status = PRIVATE_DIRECTORY.lstat()
    except FileNotFoundError:
        return ""
    if stat.S_ISDIR(directory_status.st_mode) and directory_status.st_uid == os.getuid():
        return ""
    return (
        f"{PRIVATE_DIRECTORY}: is not a directory of this user, but must hold Ray's session "
        "directories; allowed: a directory of this user; fix: ask its owner or the administrator "
        "to remove it"
    )


def remove_stale_sessions(directory: Path) -> None:
    """Remove the sessions of Ray instances that have ended, except the newest ``KEPT_SESSIONS``."""
    ended_sessions = [
        path
        for path in sorted(directory.glob("session_*_*"))
        if not path.is_symlink()
        and path.stat().st_uid == os.getuid()
        and not _is_session_running(path)
    ]
    # The names begin with the start time, so the paths are sorted by age.
    for path in ended_sessions[:-KEPT_SESSIONS]:
        shutil.rmtree(path, ignore_errors=True)


def _is_session_running(session_directory: Path) -> bool:
    """Return True unless it is certain that the Ray instance of ``session_directory`` has ended."""
    pid = session_directory.name.rpartition("_")[2]
    if not pid.isdecimal() or Path(f"/proc/{pid}").exists():
        return True
    # The process may run in another container that shares this directory. Then its Ray socket
    # accepts connections.
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as connection:
        try:
            connection.connect(str(session_directory / "sockets" / "raylet"))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True


def find_ray_token_path() -> Path | None:
    """Return the path of Ray's token file, or None if Ray reads no token from a file."""
    is_token_mode_off = os.environ.get("RAY_AUTH_MODE", "token").lower() != "token"
    if is_token_mode_off or os.environ.get("RAY_AUTH_TOKEN"):
        return None
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")


def _protect_ray_token(should_create: bool) -> None:
    path = find_ray_token_path()
    if path is None:
        if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
            logger.warning(
                "RAY_AUTH_MODE=%s: Ray runs without token authentication",
                os.environ["RAY_AUTH_MODE"],
            )
        return
    if should_create and not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_ray_token(path)
    if path.exists() and path.stat().st_uid == os.getuid() and path.stat().st_mode & 0o077:
        path.chmod(0o600)


def _write_ray_token(path: Path) -> None:
    # Write a temporary file and link it to ``path``, so that no process reads an incomplete token.
    temporary_path = path.with_name(f".{path.name}.{os.getpid()}")
    file_descriptor = os.open(temporary_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(file_descriptor, "w", encoding="ascii") as file:
        file.write(secrets.token_hex(32))
    try:
        os.link(temporary_path, path)
    except FileExistsError:
        logger.debug("another process wrote %s first", path)
    finally:
        temporary_path.unlink()


def _collect_ray_facts(ray: ModuleType, is_started: bool) -> dict[str, Any]:
    resources = ray.cluster_resources()
    return {
        "address": ray.get_runtime_context().gcs_address,
        "started": is_started,
        "num_cpus": resources.get("CPU", 0.0),
        "num_gpus": resources.get("GPU", 0.0),
    }
