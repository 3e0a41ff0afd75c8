"""Expert for the relay: solves every door. Its thought at a level follows that level's arrows.

The number of arrows in a thought depends only on the level, not on the door. There is no noise,
because a wrong action ends the episode. With ``variant=trap`` a share of the thoughts of the
highest level start at a wrong place and lead to a wrong action. Such failed episodes are
demonstrated as well.
"""

import string
from itertools import permutations
from typing import Any

from agent_system.environments.env import Observation, Task
from agent_system.environments.env_package.relay.doors import (
    NAME,
    draw_tasks,
    needed_level,
    parse_door,
)
from agent_system.environments.env_package.relay.settings import RelaySettings
from agent_system.environments.expert_protocol import Decision, EpisodeStart, Expert, Thought
from rlvcr.levels import LEVELS


class RelayExpert:
    """Expert in one episode. It reads doors from observations."""

    def __init__(self, episode: EpisodeStart[RelaySettings]) -> None:
        self.settings = episode.settings
        self.rng = episode.rng
        self.door = parse_door(episode.first.text)

    def act(self) -> Decision:
        """Return the place that opens the door, with the thought of each level."""
        hops = self.settings.hops
        chain = self.door.follow_arrows(self.door.place, hops[-1])
        thoughts = {
            level: Thought(write_chain(chain[:count]), self.door.goal_place)
            for level, count in zip(LEVELS, hops, strict=True)
        }
        if self.rng.random() < self.settings.wrong_thought_share:
            thoughts[LEVELS[-1]] = self._wrong_thought()
        level = needed_level(self.door.hops, hops)
        return Decision(self.door.goal_place, thoughts=thoughts, needed_level=level)

    def observe(self, action: str, observation: Observation) -> None:
        """Read the next door from ``observation``."""
        del action  # it was right: otherwise the episode would be over
        self.door = parse_door(observation.text)

    def _wrong_thought(self) -> Thought:
        """Return a thought that starts at a wrong place, with the action that it leads to."""
        door = self.door
        wrong_place = self.rng.choice([place for place in door.all_places if place != door.place])
        path = door.follow_arrows(wrong_place, self.settings.hops[-1])
        # With 0 arrows the answer is the start place. It does not depend on the thought.
        return Thought(write_chain(path), path[door.hops - 1] if door.hops else door.place)


def write_chain(chain: list[str]) -> str:
    """Return the thought that visits the places of ``chain`` one by one: ``1=c 2=f``."""
    return " ".join(f"{step_number}={place}" for step_number, place in enumerate(chain, start=1))


def list_demonstration_tasks(settings: RelaySettings, count: int) -> list[Task]:
    """Return episodes for demonstrations, of training doors with a separate seed.

    Cycles have ``shortest_cycle`` to ``places`` places.
    """
    doors = settings.demonstrated_doors
    return draw_tasks(settings, "demonstrations", count, doors, settings.shortest_cycle)


def make_demonstration_key(settings: RelaySettings) -> list[Any]:
    """Return all settings that change a demonstration, which are all except ``doors``."""
    return [
        NAME,
        EXPERT.version,
        settings.demonstrated_doors,
        settings.places,
        settings.shortest_cycle,
        settings.hops,
        settings.wrong_thought_share,
        settings.task_seed,
        settings.prompt,
    ]


def list_token_symbols(settings: RelaySettings) -> list[str]:
    """Return the texts that a new tokenizer encodes as one token each.

    These are arrows (``a>b``), questions (``d+3``) and steps of a thought (``1=c``), each with a
    leading space if one precedes it in a text.
    """
    places = string.ascii_lowercase[: settings.places]
    counts = range(1, settings.hops[-1] + 1)
    arrows = [f" {tail}>{head}" for tail, head in permutations(places, 2)]
    questions = [f"+{count}" for count in (0, *counts)]
    # Step 1 begins a thought, so no space precedes it.
    hops = [f"{' ' if count > 1 else ''}{count}={place}" for count in counts for place in places]
    return [*arrows, *questions, *hops]


EXPERT = Expert(
    RelayExpert,
    tasks=list_demonstration_tasks,
    key=make_demonstration_key,
    symbols=list_token_symbols,
    keeps_unsuccessful=True,
    names_needed_level=lambda _: True,  # by the number of arrows of a door
)
