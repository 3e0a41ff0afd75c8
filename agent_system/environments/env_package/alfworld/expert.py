"""Expert for the six task types. It uses the observations only: no planner and no game files.

It visits one receptacle after another, opens closed ones, and remembers the objects it saw. With
each action it returns the parts of a thought: the situation, what was tried, the plan.

Noise makes demonstrations imperfect in two ways:

- ``useless_share``: probability of a valid action that is useless (look, inventory, examine, go).
  Reinforcement learning can then improve on the demonstrations.
- ``invalid_share``: probability of an action that gives "Nothing happens.". Imitation can then
  learn to recover from one.
"""

import random
import re
from dataclasses import dataclass

from agent_system.environments.env import Observation
from agent_system.environments.env_package.alfworld.prompts import task_of
from agent_system.environments.expert_protocol import Decision, Noise

_THING = re.compile(r"an? ([a-z]+ \d+)")
# Patterns must match the full sentence: each sentence of the templates then has one kind.
_SENTENCES = (
    (
        "light",
        re.compile(r"(?:look at|examine the) (?P<object>\w+) (?:under|with) the (?P<lamp>\w+)"),
    ),
    ("two", re.compile(r"(?:put|find) two (?P<object>\w+) (?:and put them )?in (?P<place>\w+)")),
    (
        "clean",
        re.compile(r"(?:put a clean|clean some) (?P<object>\w+) (?:and put it )?in (?P<place>\w+)"),
    ),
    (
        "heat",
        re.compile(r"(?:put a hot|heat some) (?P<object>\w+) (?:and put it )?in (?P<place>\w+)"),
    ),
    (
        "cool",
        re.compile(r"(?:put a cool|cool some) (?P<object>\w+) (?:and put it )?in (?P<place>\w+)"),
    ),
    ("pick", re.compile(r"put (?:a|some) (?P<object>\w+) (?:in|on) (?P<place>\w+)")),
)
# Receptacle classes for invalid actions: the expert goes to one that the room does not have.
_FURNITURE = (
    "bed",
    "cabinet",
    "countertop",
    "desk",
    "drawer",
    "dresser",
    "fridge",
    "shelf",
    "sidetable",
    "toilet",
)
TOOL = {"clean": "sinkbasin", "heat": "microwave", "cool": "fridge"}


@dataclass(frozen=True, slots=True)
class TaskGoal:
    """Parsed task sentence: task type, and classes of the object, the target receptacle and the
    lamp ("" if the task has none).
    """

    kind: str
    object: str
    place: str
    lamp: str


def understand(sentence: str) -> TaskGoal:
    """Parse a task sentence made from the templates of the alfworld wheel.

    Raises ``ValueError`` for any other sentence.
    """
    for kind, pattern in _SENTENCES:
        match = pattern.fullmatch(sentence)
        if match:
            parts = match.groupdict()
            return TaskGoal(kind, parts["object"], parts.get("place", ""), parts.get("lamp", ""))
    raise ValueError(f"{sentence!r} is not a task sentence of ALFWorld's templates")


def cls(name: str) -> str:
    """Return the class of an object or receptacle: ``mug 2`` gives ``mug``."""
    return name.rsplit(" ", 1)[0]


class AlfworldPlayer:
    """Expert of one episode: ``act`` returns an action, ``observe`` receives the answer to it."""

    def __init__(self, first_text: str, rng: random.Random, noise: Noise | None = None) -> None:
        self.asked = understand(task_of(first_text))
        self.rng = rng
        self.noise = noise or Noise()
        self.room = _THING.findall(first_text.split("you see", 1)[1].split("Your task", 1)[0])
        # Receptacle -> objects there, in the order of the first visits.
        self.seen: dict[str, set[str]] = {}
        self.closed: set[str] = set()
        self.placed: set[str] = set()
        self.at: str | None = None
        self.held: str | None = None
        self.origin = ""
        self.treated = False
        self.home: str | None = None  # receptacle of the object that was placed last
        self.failed = ""  # the last action, if the answer was "Nothing happens."

    def act(self) -> Decision:
        """Return the next action. Noise may replace it by a useless or an invalid one."""
        decision = self._decide()
        # One draw for both kinds of noise: their probabilities add up and exclude each other.
        draw = self.rng.random()
        if draw < self.noise.slips:
            return self._slip(decision)
        is_useless = draw < self.noise.slips + self.noise.slack
        return self._dawdle(decision) if is_useless else decision

    def observe(self, action: str, observation: Observation) -> None:
        """Update the remembered state from the engine's answer to ``action``."""
        text = observation.text
        self.failed = action if text.startswith("Nothing happens") else ""
        if self.failed:
            if action.startswith("go to ") and action.removeprefix("go to ") in self.room:
                # The agent already stands at this place: receptacles can share one.
                self.at = action.removeprefix("go to ")
            return
        verb = action.split(" ", 1)[0]
        if verb == "go":
            self.at = action.removeprefix("go to ")
        elif verb == "take":
            self.held, self.origin = action.removeprefix("take ").split(" from ")
            self.treated = False
            self.seen.get(self.origin, set()).discard(self.held)
        elif verb == "move":
            name, self.home = action.removeprefix("move ").split(" to ")
            self.held = None
            self.placed.add(name)
            self.seen.setdefault(self.home, set()).add(name)
        elif verb in TOOL:
            self.treated = True
        self._look(verb, text)

    def _look(self, verb: str, text: str) -> None:
        if self.at is None or verb not in ("go", "open", "examine"):
            return
        if "is closed" in text:
            self.closed.add(self.at)
        elif "you see" in text and (verb != "examine" or self.at in text):
            # A receptacle is either closed or seen: once opened, its content is in the text.
            self.closed.discard(self.at)
            self.seen[self.at] = set(_THING.findall(text.split("you see", 1)[1]))

    # Decisions without noise

    def _decide(self) -> Decision:
        if self.at in self.closed:
            return self._say(f"open {self.at}", f"{self.at} closed", f"open {self.at}")
        if self.at is not None and self.at not in self.seen:
            return self._say(f"examine {self.at}", f"at {self.at}", f"examine {self.at}")
        if self.held is None:
            return self._fetch()
        tool = TOOL.get(self.asked.kind)
        if tool and not self.treated:
            place = self._nearest(tool)
            use = f"{self.asked.kind} {self.held} with {place}"
            return (
                self._say(use, f"hold {self.held}", use)
                if self.at == place
                else self._go(place, use)
            )
        if self.asked.lamp:
            return self._light()
        place = (
            self.at
            if self.at is not None and cls(self.at) == self.asked.place
            else self._nearest(self.asked.place)
        )
        put = f"move {self.held} to {place}"
        return (
            self._say(put, f"hold {self.held}", put) if self.at == place else self._go(place, put)
        )

    def _fetch(self) -> Decision:
        # Objects that are already at the target are skipped.
        candidate = self._find(self.asked.object)
        if candidate is None:
            return self._search(f"need {self.asked.object}")
        name, place = candidate
        take = f"take {name} from {place}"
        situation = f"{name} in {place}"
        return (
            self._say(take, situation, take)
            if self.at == place
            else self._go(place, take, situation)
        )

    def _light(self) -> Decision:
        candidate = self._find(self.asked.lamp)
        if candidate is None:
            return self._search(f"hold {self.held} need {self.asked.lamp}")
        lamp, place = candidate
        use = f"use {lamp}"
        situation = f"{lamp} in {place}"
        return (
            self._say(use, situation, use) if self.at == place else self._go(place, use, situation)
        )

    def _find(self, wanted: str) -> tuple[str, str] | None:
        """Return an object of class ``object_class`` and its receptacle, or None.

        Objects at the target are skipped. The present place comes first, then the order of visits.
        """
        # The sort is stable: the other places keep the order of the first visits.
        for place in sorted(self.seen, key=lambda name: name != self.at):
            for name in sorted(self.seen[place]):
                if (
                    cls(name) == wanted
                    and name not in self.placed
                    and cls(place) != self.asked.place
                ):
                    return name, place
        return None

    def _search(self, situation: str) -> Decision:
        """Go to a random receptacle without known content; the target class is the last choice."""
        unseen = [place for place in self.room if place not in self.seen]
        likely = [place for place in unseen if cls(place) != self.asked.place]
        elsewhere = [place for place in self.room if place != self.at]
        place = self.rng.choice(likely or unseen or elsewhere or self.room)
        return self._go(
            place, f"look for {self.asked.lamp if self.held else self.asked.object}", situation
        )

    def _nearest(self, wanted: str) -> str:
        """Return a receptacle of the class: that of the last placed object, else one whose content
        is known, else any. Raises ``ValueError`` if the room has none.
        """
        places = [place for place in self.room if cls(place) == wanted]
        if not places:
            raise ValueError(f"the room has no {wanted!r}; its receptacles: {self.room}")
        if self.home is not None and self.home in places:
            return self.home
        opened = [place for place in places if place in self.seen]
        return self.rng.choice(opened or places)

    def _go(self, place: str, then: str, situation: str | None = None) -> Decision:
        situation = f"hold {self.held}" if situation is None else situation
        return self._say(f"go to {place}", situation, f"go to {place} then {then}")

    def _say(self, action: str, situation: str, plan: str) -> Decision:
        tried = (
            f"tried {', '.join(self.seen) or 'nothing'}"
            if self.held is None
            else f"took from {self.origin}"
        )
        return Decision(action, situation, f"failed {self.failed}" if self.failed else tried, plan)

    def _dawdle(self, decision: Decision) -> Decision:
        """Return a random valid action that does not advance the task."""
        options = ["look", "inventory"]
        if self.at is not None:
            options += [f"examine {self.at}"]
        elsewhere = [place for place in self.room if place != self.at]
        if elsewhere:
            options += [f"go to {self.rng.choice(elsewhere)}"]
        action = self.rng.choice(options)
        return Decision(action, decision.situation, decision.tried, action, slack=True)

    def _slip(self, decision: Decision) -> Decision:
        """Return a random invalid action.

        It goes to the present place or to a receptacle that the room lacks, or it moves or takes an
        object at a wrong place.
        """
        absent = [name for name in _FURNITURE if name not in map(cls, self.room)]
        options = [f"go to {self.rng.choice(absent)} 1"] + (
            [f"go to {self.at}"] if self.at is not None else []
        )
        if self.held is not None:
            elsewhere = [place for place in self.room if place != self.at] or self.room
            options.append(f"move {self.held} to {self.rng.choice(elsewhere)}")
        else:
            options.append(f"take {self.asked.object} 1 from {self._bare(self.at or self.room[0])}")
        action = self.rng.choice(options)
        return Decision(action, decision.situation, decision.tried, action, slip=True)

    def _bare(self, here: str) -> str:
        """Return a receptacle from which taking the object fails: ``here``, or another one if an
        object of the class was seen at ``here``.
        """
        lies_here = any(cls(name) == self.asked.object for name in self.seen.get(here, ()))
        others = [place for place in self.room if place != here]
        return self.rng.choice(others) if lies_here and others else here
