"""An expert for the relay: knows every door, and writes on each level as many arrows as that level
follows, whatever the door asks for.

It plays as well as it can: an action that brings an episode no further loses it here, so there is
no noise. With ``variant=trap`` some of its deepest thoughts leave from a wrong place, and it
follows them to a wrong action: such episodes are lost, and are demonstrated like the others.
"""

import random
import string
from itertools import permutations
from typing import Any

from agent_system.environments.env import Observation, Task
from agent_system.environments.env_package.relay.doors import needed_level
from agent_system.environments.env_package.relay.prompts import door_in
from agent_system.environments.env_package.relay.settings import RelaySettings
from agent_system.environments.env_package.relay.tasks import draw_tasks
from agent_system.environments.expert_protocol import Decision, EpisodeStart, Expert, Thought
from rlvcr.levels import LEVELS


class RelayPlayer:
    """Plays one episode from what it reads."""

    def __init__(self, settings: RelaySettings, first: Observation, rng: random.Random) -> None:
        self.settings = settings
        self.rng = rng
        self.door = door_in(first.text)

    def act(self) -> Decision:
        """The place that opens the door, with the thought of each level."""
        hops = self.settings.hops
        chain = self.door.follow(self.door.place, hops[-1])
        thoughts = {
            level: Thought(written(chain[:count]), self.door.goal)
            for level, count in zip(LEVELS, hops, strict=True)
        }
        if self.rng.random() < self.settings.share_of_wrong:
            thoughts[LEVELS[-1]] = self._wrong_thought()
        return Decision(
            self.door.goal,
            thoughts=thoughts,
            needed_level=needed_level(self.door.hops, hops),
        )

    def observe(self, action: str, observation: Observation) -> None:
        """The next door."""
        del action  # it was right, or the episode would be over
        self.door = door_in(observation.text)

    def _wrong_thought(self) -> Thought:
        """A thought that leaves from a wrong place and follows the arrows from there, with the
        action that it leads to.
        """
        door = self.door
        elsewhere = self.rng.choice([place for place in door.places if place != door.place])
        way = door.follow(elsewhere, self.settings.hops[-1])
        # No arrow to follow: nothing to go wrong with.
        return Thought(written(way), way[door.hops - 1] if door.hops else door.place)


def written(chain: list[str]) -> str:
    """``1=c 2=f``: the places of ``chain``, numbered, so that an action finds its own by number."""
    return " ".join(f"{number}={place}" for number, place in enumerate(chain, start=1))


def start(episode: EpisodeStart[RelaySettings]) -> RelayPlayer:
    """An expert that has read the first door."""
    return RelayPlayer(episode.settings, episode.first, episode.rng)


def demonstrated(settings: RelaySettings, count: int) -> list[Task]:
    """Episodes for demonstrations alone, of doors that are not held out; their cycles are of all
    lengths from ``shortest_cycle`` on.
    """
    doors = settings.demonstrated_doors
    return draw_tasks(settings, "demonstrations", count, doors, settings.shortest_cycle)


def key(settings: RelaySettings) -> list[Any]:
    """What changes a demonstration: not how many doors are played otherwise."""
    shaping = (
        settings.demonstrated_doors,
        settings.places,
        settings.shortest_cycle,
        settings.hops,
        settings.share_of_wrong,
        settings.task_seed,
        settings.prompt,
    )
    return ["relay", EXPERT.version, *shaping]


def symbols(settings: RelaySettings) -> list[str]:
    """Arrows, questions and hops, each with the space that stands before it in a sentence."""
    places = string.ascii_lowercase[: settings.places]
    counts = range(1, settings.hops[-1] + 1)
    arrows = [f" {tail}>{head}" for tail, head in permutations(places, 2)]
    questions = [f"+{count}" for count in (0, *counts)]
    # A thought begins with its first hop.
    hops = [f"{' ' if count > 1 else ''}{count}={place}" for count in counts for place in places]
    return [*arrows, *questions, *hops]


def knows_needs(settings: RelaySettings) -> bool:
    """It does: a door says how many arrows to follow."""
    del settings  # they change nothing here
    return True


EXPERT = Expert(
    start,
    tasks=demonstrated,
    key=key,
    symbols=symbols,
    keeps_lost=True,
    tells_needed_level=knows_needs,
)
