"""Expert (scripted policy) for the relay. Its thoughts follow the arrows of a puzzle step by step.

Its actions are right. The number of arrows in a thought depends only on the thinking level, not on
the puzzle. There is no noise, because a wrong action ends the episode. With ``variant=trap``, some
thoughts of the highest level start at a wrong place and lead to a wrong action. Demonstrations
include these failed episodes.
"""

import string
from itertools import permutations
from typing import Any

from agent_system.environments.env import Observation, Task
from agent_system.environments.env_package.relay import doors
from agent_system.environments.env_package.relay.settings import RelaySettings
from agent_system.environments.expert_protocol import Decision, EpisodeStart, Expert, Thought
from rlvcr.levels import LEVELS


class RelayExpert:
    """Scripted policy for one episode. It reads doors (puzzles) from observations."""

    def __init__(self, episode: EpisodeStart[RelaySettings]) -> None:
        self.settings = episode.settings
        self.rng = episode.rng
        self.door = doors.parse_door(episode.first.text)

    def act(self) -> Decision:
        hops_by_level = self.settings.hops
        places = self.door.follow_arrows(self.door.place, hops_by_level[-1])
        thoughts = {
            level: Thought(format_chain(places[:count]), self.door.answer_place)
            for level, count in zip(LEVELS, hops_by_level, strict=True)
        }
        if self.rng.random() < self.settings.wrong_thought_share:
            thoughts[LEVELS[-1]] = self._make_wrong_thought()
        level = doors.compute_needed_level(self.door.hops, hops_by_level)
        return Decision(self.door.answer_place, thoughts=thoughts, needed_level=level)

    def observe(self, action: str, observation: Observation) -> None:
        # The action was right: a wrong action would have ended the episode.
        self.door = doors.parse_door(observation.text)

    def _make_wrong_thought(self) -> Thought:
        """Return a thought that starts at a wrong place, with the resulting action."""
        door = self.door
        wrong_place = self.rng.choice([place for place in door.all_places if place != door.place])
        path = door.follow_arrows(wrong_place, self.settings.hops[-1])
        # With 0 arrows to follow, the answer is the start place, whatever the thought states.
        return Thought(format_chain(path), path[door.hops - 1] if door.hops else door.place)


def format_chain(places: list[str]) -> str:
    """Return a thought that lists ``places`` with step numbers: ``1=c 2=f``."""
    return " ".join(f"{step_number}={place}" for step_number, place in enumerate(places, start=1))


def list_demonstration_tasks(settings: RelaySettings, count: int) -> list[Task]:
    """Return tasks like those for training, from another seed.

    The arrows of a door form cycles of ``settings.shortest_cycle`` or more places.
    """
    doors_per_task = settings.demonstrated_doors
    return doors.generate_tasks(
        settings, "demonstrations", count, doors_per_task, settings.shortest_cycle
    )


def make_demonstration_cache_key(settings: RelaySettings) -> list[Any]:
    """Return all values that change the demonstrations: the key of their cache."""
    return [
        doors.NAME,
        EXPERT.version,
        settings.demonstrated_doors,
        settings.places,
        settings.shortest_cycle,
        settings.hops,
        settings.level_weights,
        settings.wrong_thought_share,
        settings.task_seed,
        settings.prompt,
    ]


def list_single_token_texts(settings: RelaySettings) -> list[str]:
    """Return texts that a new tokenizer encodes as one token each.

    They are arrows (``a>b``), questions (``+3``) and steps of a thought (``1=c``). A text that
    follows a space in prompts or thoughts includes this space.
    """
    places = string.ascii_lowercase[: settings.places]
    arrow_counts = range(1, settings.hops[-1] + 1)
    arrows = [f" {start_place}>{end_place}" for start_place, end_place in permutations(places, 2)]
    questions = [f"+{number}" for number in (0, *arrow_counts)]
    # A thought begins with step 1, so no space precedes this step.
    thought_steps = [
        f"{' ' if number > 1 else ''}{number}={place}"
        for number in arrow_counts
        for place in places
    ]
    return [*arrows, *questions, *thought_steps]


EXPERT = Expert(
    RelayExpert,
    tasks=list_demonstration_tasks,
    key=make_demonstration_cache_key,
    symbols=list_single_token_texts,
    keeps_unsuccessful=True,
    names_needed_level=lambda _: True,  # the number of arrows to follow determines the level
)
