"""Machines for which ``--check --on MACHINE`` checks a config: ``8xH100``, ``2x8xA100:40``."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from verl.config.derive import count_engine_gpus_by_node, engines_have_separate_gpus
from verl.config.problems import build_conflict, build_problem
from verl.config.schema import PPOConfig
from verl.config.settings import ConfigError, Problem
from verl.config.settings.hints import nearest_name

# Usable memory of a GPU in GiB, by name. If a GPU has two memory sizes, its name contains the size.
MEMORY_GB = {
    "RTX3090": 23.7,
    "RTX4090": 23.6,
    "RTX5090": 31.8,
    "A10": 22.5,
    "A10G": 22.5,
    "L4": 22.5,
    "L40S": 44.7,
    "A6000": 47.5,
    "A100-40GB": 39.6,
    "A100-80GB": 79.3,
    "H100": 79.6,
    "H200": 140.4,
    "B200": 178.4,
}
MACHINE_PATTERN = re.compile(
    r"(?:(?P<nodes>[1-9]\d*)x)?(?P<gpus>[1-9]\d*)x(?P<name>[a-z][\w-]*)"
    r"(?::(?P<memory>\d+(?:\.\d+)?)(?:gi?b)?)?",
    re.IGNORECASE,
)
ALLOWED_MACHINES = "GPUSxNAME or NODESxGPUSxNAME, optionally with :GIB, as 8xH100 or 2x8xA100:40"


@dataclass(frozen=True)
class Machine:
    """Group of nodes with equal GPUs; ``gpus`` are per node, ``memory_gb`` is GiB per GPU."""

    nodes: int
    gpus: int
    name: str
    memory_gb: float

    def __str__(self) -> str:
        return f"{self.nodes} x {self.gpus} x {self.name} with {self.memory_gb:g} GiB"


def parse_machine(text: str) -> Machine:
    """Parse a text such as ``2x8xA100:40``; raise ``ConfigError`` for an unknown GPU or format."""
    match = MACHINE_PATTERN.fullmatch(text.strip())
    if match is None:
        message = f"--on {text}: no devices; allowed: {ALLOWED_MACHINES}; fix: --on 8xH100"
        raise ConfigError(message, "invalid_syntax")
    name = match["name"]
    memory_gb_by_name = {key.lower(): value for key, value in MEMORY_GB.items()}
    memory_gb = float(match["memory"] or memory_gb_by_name.get(name.lower(), 0))
    if memory_gb <= 0:
        similar_name = nearest_name(name.upper(), MEMORY_GB, cutoff=0.5)
        suggestion = f", or {similar_name}" if similar_name else ""
        why = f"the memory of a {name} is not known"
        allowed = f"{', '.join(MEMORY_GB)}, or a name with its GiB after a colon"
        message = f"--on {text}: {why}; allowed: {allowed}; fix: {name}:80{suggestion}"
        raise ConfigError(message, "unknown_name")
    return Machine(int(match["nodes"] or 1), int(match["gpus"]), name, memory_gb)


def apply_machine(cfg: PPOConfig, machine: Machine) -> list[Problem]:
    """Set ``trainer.device=cuda``; return messages about devices that ``machine`` lacks."""
    if cfg.trainer.device == "cpu":
        why = f"it contradicts --on {machine}"
        return [build_conflict(cfg, "trainer.device", why, "auto, cuda", "trainer.device=auto")]
    cfg.trainer.device = "cuda"
    return list(_find_missing_devices(cfg, machine))


def _find_missing_devices(cfg: PPOConfig, machine: Machine) -> Iterator[Problem]:
    trainer = cfg.trainer
    for key, num_available in (("n_gpus_per_node", machine.gpus), ("nnodes", machine.nodes)):
        if getattr(trainer, key) > num_available:
            key_path = f"trainer.{key}"
            why = f"--on gives {machine}"
            allowed, fix = f"{num_available} or fewer", f"{key_path}={num_available}"
            yield build_problem(cfg, key_path, why, allowed, fix, "does_not_fit")
    needed_gpus = trainer.nnodes * trainer.n_gpus_per_node
    if engines_have_separate_gpus(cfg, "cuda"):
        needed_gpus += sum(count_engine_gpus_by_node(cfg))
        if needed_gpus > machine.nodes * machine.gpus:
            why = f"engines and training ranks need {needed_gpus} GPUs, and --on gives {machine}"
            key = "actor_rollout_ref.rollout.nnodes"
            fix = "more devices in --on, or fewer engines or training ranks"
            allowed = "nodes that the training ranks do not use"
            yield build_problem(cfg, key, why, allowed, fix, "does_not_fit")
