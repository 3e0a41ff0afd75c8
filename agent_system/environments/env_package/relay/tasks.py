"""Tasks of the relay: episodes of doors, drawn from ``task_seed``."""

import hashlib
from itertools import islice

from agent_system.environments.env import Task
from agent_system.environments.env_package.relay.doors import draw_doors
from agent_system.environments.env_package.relay.settings import RelaySettings
from verl.utils.seeds import derive_seed

NAME = "relay"


def list_tasks(settings: RelaySettings, split: str) -> list[Task]:
    """Return the episodes of ``split``. The splits have no door in common."""
    count = settings.val_tasks if split == "val" else settings.train_tasks
    return draw_tasks(settings, split, count, settings.doors)


def draw_tasks(
    settings: RelaySettings, purpose: str, count: int, doors: int, shortest: int | None = None
) -> list[Task]:
    """Return ``count`` episodes of ``doors`` doors each.

    The purpose ``val`` gets validation doors, every other purpose training doors. Cycles have
    ``shortest`` to ``settings.places`` places. None: exactly ``settings.places``.
    """
    longest_cycle = settings.places
    drawn_doors = draw_doors(
        (longest_cycle if shortest is None else shortest, longest_cycle),
        settings.hops[-1],
        derive_seed(NAME, settings.task_seed, purpose),
        is_validation=purpose == "val",
    )
    tasks = []
    for _ in range(count):
        door_texts = [str(door) for door in islice(drawn_doors, doors)]
        digest = hashlib.blake2b("\n".join(door_texts).encode(), digest_size=8).hexdigest()
        tasks.append({"task_id": f"{NAME}/{digest}", "data_source": NAME, "doors": door_texts})
    return tasks
