"""The devices of another machine, as ``--check --on`` states them: ``8xH100``, ``2x8xA100:40``."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from verl.config.derive import engine_gpus, have_own_gpus
from verl.config.problems import problem
from verl.config.schema import PPOConfig
from verl.config.settings import ConfigError
from verl.config.settings.hints import nearest_name

# GiB that a device has for programs, by its name; those that come in two sizes state theirs.
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
FORM = re.compile(
    r"(?:(?P<nodes>\d+)x)?(?P<gpus>\d+)x(?P<name>[a-z][\w-]*)(?::(?P<memory>[\d.]+)(?:gi?b)?)?",
    re.IGNORECASE,
)
ALLOWED = "GPUSxNAME, NODESxGPUSxNAME, each with :GIB behind it, as 8xH100 or 2x8xA100:40"


@dataclass(frozen=True)
class Machine:
    """Nodes that are alike, and the memory of one of their devices in GiB."""

    nodes: int
    gpus: int
    name: str
    memory_gb: float

    def __str__(self) -> str:
        return f"{self.nodes} x {self.gpus} x {self.name} with {self.memory_gb:g} GiB"


def stated_machine(text: str) -> Machine:
    """The machine that ``text`` states. Raises ``ConfigError`` where it is none, or nobody knows
    how much memory it has.
    """
    found = FORM.fullmatch(text.strip())
    nodes = int(found["nodes"] or 1) if found else 0
    gpus = int(found["gpus"]) if found else 0
    if found is None or not nodes or not gpus:
        raise ConfigError(f"--on {text}: no devices; allowed: {ALLOWED}; fix: --on 8xH100")
    name = found["name"]
    known = {key.lower(): value for key, value in MEMORY_GB.items()}
    try:
        memory = float(found["memory"]) if found["memory"] else known.get(name.lower(), 0.0)
    except ValueError:
        memory = 0.0
    if memory <= 0:
        guess = nearest_name(name.upper(), MEMORY_GB, cutoff=0.5)
        near = f", or {guess}" if guess else ""
        why = f"how much memory a {name} has is not known"
        allowed = f"{', '.join(MEMORY_GB)}, or its GiB behind a colon"
        raise ConfigError(f"--on {text}: {why}; allowed: {allowed}; fix: {name}:80{near}")
    return Machine(nodes, gpus, name, memory)


def use_machine(cfg: PPOConfig, machine: Machine) -> list[str]:
    """Have ``cfg`` checked for ``machine``; what it lacks of what the config asks for."""
    if cfg.trainer.device == "cpu":
        why = f"devices are stated (--on {machine})"
        return [problem(cfg, "trainer.device", why, "auto, cuda", "trainer.device=auto")]
    cfg.trainer.device = "cuda"
    return list(_missing(cfg, machine))


def _missing(cfg: PPOConfig, machine: Machine) -> Iterator[str]:
    trainer = cfg.trainer
    for key, there in (("n_gpus_per_node", machine.gpus), ("nnodes", machine.nodes)):
        if getattr(trainer, key) > there:
            path = f"trainer.{key}"
            why = f"stated are {machine} (--on)"
            yield problem(cfg, path, why, f"{there} or fewer", f"{path}={there}")
    needed = trainer.nnodes * trainer.n_gpus_per_node
    if have_own_gpus(cfg, "cuda"):
        needed += sum(engine_gpus(cfg))
        if needed > machine.nodes * machine.gpus:
            why = f"with those of the training ranks {needed} GPUs are needed, and {machine} stated"
            key = "actor_rollout_ref.rollout.nnodes"
            yield problem(cfg, key, why, "what is left", "more devices in --on, or fewer of either")
