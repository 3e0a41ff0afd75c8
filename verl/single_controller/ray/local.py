"""Starting Ray: on this machine alone, reachable through the loopback interface only, or joining a
given cluster.

What Ray 2.60 offers and what is done with it here:

* It turns ``_node_ip_address="127.0.0.1"`` into the machine's outward address on Linux, and its
  servers then listen on every interface. ``RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0`` switches to its
  desktop behaviour, in which the node's address is 127.0.0.1 and all its servers bind to that.
* Token authentication is on unless ``RAY_AUTH_MODE`` says otherwise, but Ray writes the token
  readable for everybody. The token is made here first, readable for its owner alone.
* Its session directories (logs, sockets) are writable for everybody. They are put below a directory
  that only their owner can enter.
"""

import contextlib
import logging
import os
import secrets
import shutil
import socket
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from verl.config.settings.errors import ConfigError
from verl.utils.interrupt import sigterm_handler_kept
from verl.utils.stacks import STACKS_DIR

LOOPBACK_SWITCH = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
OBJECT_STORE_GB = 1.0
# In /tmp whatever TMPDIR says: the path of a socket below it may have 107 characters.
PRIVATE = Path(f"/tmp/verl-{os.getuid()}")
KEPT_SESSIONS = 3

logger = logging.getLogger(__name__)


def init_ray(ray_init_cfg: object = None, **overrides: object) -> dict[str, Any]:
    """Start Ray, or join the cluster at ``address`` (default: the environment's ``RAY_ADDRESS``);
    returns facts.

    ``ray_init_cfg`` is the ``ray_init`` section (an object or a mapping) of which ``address``,
    ``num_cpus``, ``num_gpus``, ``object_store_gb``, ``log_to_driver`` and ``runtime_env`` (Ray's:
    what every worker finds, its environment variables above all) are read where present;
    ``overrides`` take precedence. A Ray that runs in this process already is left as it is. The
    facts: ``address``, ``started`` (a new local Ray), ``node_ip``, ``loopback_only``, ``num_cpus``,
    ``num_gpus``, ``object_store_gb``, ``token_file`` and ``session_dir``.
    """
    options = _options(ray_init_cfg, overrides)
    address = options["address"] or os.environ.get("RAY_ADDRESS")
    local = not address or address == "local"
    if local:
        _prefer_loopback()
    import ray  # after the switch, which Ray reads when it is imported

    if ray.is_initialized():
        return _facts(ray, started=False)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray would let everything else on the machine go first.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Ray keeps a record of each call for its dashboard, 3 kB each and up to 100,000 of them.
    os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
    # Ray announces the token at every start; the facts say it instead
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    _protect_token(create=local)
    common = {"logging_level": logging.WARNING, "log_to_driver": options["log_to_driver"]}
    runtime_env = dict(options["runtime_env"] or {})
    if not local and STACKS_DIR in os.environ:
        # Nodes of a cluster inherit nothing from here.
        given = {STACKS_DIR: os.environ[STACKS_DIR]}
        runtime_env["env_vars"] = {**given, **runtime_env.get("env_vars", {})}
    if runtime_env:
        common["runtime_env"] = runtime_env
    if local:
        sessions = _private_directory() / "ray"
        remove_stale_sessions(sessions)
        common |= {
            "num_cpus": options["num_cpus"],
            "num_gpus": options["num_gpus"],
            "object_store_memory": int(options["object_store_gb"] * 1e9),
            "include_dashboard": False,
            "_node_ip_address": "127.0.0.1",
            "_temp_dir": str(sessions),
        }
    with sigterm_handler_kept():  # Ray's own drains the node for up to 30 s first
        ray.init(address="local" if local else address, **common)
    _protect_token(create=False)
    facts = _facts(ray, started=local)
    if local and not facts["loopback_only"]:
        logger.warning("Ray listens on %s, not on the loopback interface alone", facts["node_ip"])
    return facts


def _options(cfg: object, overrides: Mapping[str, object]) -> dict[str, Any]:
    options: dict[str, Any] = {
        "address": None,
        "num_cpus": None,
        "num_gpus": None,
        "object_store_gb": OBJECT_STORE_GB,
        "log_to_driver": False,
        "runtime_env": None,
    }
    unknown = sorted(set(overrides) - set(options))
    if unknown:
        raise TypeError(f"init_ray: unknown options {unknown}; it knows {sorted(options)}")
    for name in options:
        configured = cfg.get(name) if isinstance(cfg, Mapping) else getattr(cfg, name, None)
        value = overrides.get(name, configured)
        options[name] = options[name] if value is None else value
    return options


def _prefer_loopback() -> None:
    os.environ[LOOPBACK_SWITCH] = "0"
    constants = sys.modules.get("ray._private.ray_constants")
    if constants is not None:  # Ray was imported before the switch was set
        setattr(constants, "ENABLE_RAY_CLUSTER", False)  # noqa: B010  a module has no such field


def directory_refusal() -> str:
    """Return why Ray's session directories cannot be kept below ``PRIVATE``; empty if they can."""
    try:
        found = PRIVATE.lstat()
    except FileNotFoundError:
        return ""
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
        return ""
    return (
        f"{PRIVATE}: is no directory of this user, and Ray's session directories are kept there; "
        "allowed: a directory of this user; fix: have its owner or the administrator remove it"
    )


def _private_directory() -> Path:
    refusal = directory_refusal()
    if refusal:
        raise ConfigError(refusal)
    PRIVATE.mkdir(mode=0o700, exist_ok=True)
    PRIVATE.chmod(0o700)
    return PRIVATE


def remove_stale_sessions(directory: Path) -> None:
    """Remove the session directories in ``directory`` whose Ray has ended, except the newest
    ``KEPT_SESSIONS`` of them, whose logs may explain a failure.
    """
    ended = [
        path
        for path in sorted(directory.glob("session_*_*"))
        if not path.is_symlink() and path.stat().st_uid == os.getuid() and not _is_running(path)
    ]
    # Their names begin with the time of their start.
    for path in ended[:-KEPT_SESSIONS]:
        shutil.rmtree(path, ignore_errors=True)


def _is_running(session: Path) -> bool:
    """Whether the process that started ``session`` lives, or its Ray answers; in doubt it does."""
    pid = session.name.rpartition("_")[2]
    if not pid.isdecimal() or Path(f"/proc/{pid}").exists():
        return True
    # The process may run in another container that shares this directory.
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as connection:
        try:
            connection.connect(str(session / "sockets" / "raylet"))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True


def token_path() -> Path | None:
    """Where Ray's authentication token lies, or None when the token is in the environment or not
    used.
    """
    other_mode = os.environ.get("RAY_AUTH_MODE", "token").lower() != "token"
    if other_mode or os.environ.get("RAY_AUTH_TOKEN"):
        return None
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")


def _protect_token(create: bool) -> None:
    path = token_path()
    if path is None:
        if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
            logger.warning(
                "RAY_AUTH_MODE=%s: Ray runs without token authentication",
                os.environ["RAY_AUTH_MODE"],
            )
        return
    if create and not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_token(path)
    if path.exists() and path.stat().st_uid == os.getuid() and path.stat().st_mode & 0o077:
        path.chmod(0o600)


def _write_token(path: Path) -> None:
    # written aside and linked into place: a second run that starts now sees no token or a whole one
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(secrets.token_hex(32))
    try:
        os.link(aside, path)
    except FileExistsError:
        logger.debug("another process wrote %s first", path)
    finally:
        aside.unlink()


def _facts(ray: ModuleType, started: bool) -> dict[str, Any]:
    resources = ray.cluster_resources()
    node_ip = ray.util.get_node_ip_address()
    path = token_path()
    return {
        "address": ray.get_runtime_context().gcs_address,
        "started": started,
        "node_ip": node_ip,
        "loopback_only": node_ip.startswith("127."),
        "num_cpus": resources.get("CPU", 0.0),
        "num_gpus": resources.get("GPU", 0.0),
        "object_store_gb": round(resources.get("object_store_memory", 0.0) / 1e9, 3),
        "token_file": str(path) if path is not None and path.exists() else None,
        "session_dir": ray._private.worker._global_node.get_session_dir_path(),
    }
