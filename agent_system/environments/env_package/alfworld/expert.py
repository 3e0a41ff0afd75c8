"""An expert for the six task types that acts from what it reads: no planner, no look at the game's
files.

It searches receptacle by receptacle, opens what is closed, and remembers what it saw where.
Demonstrations need two kinds of imperfection: ``slack`` is the chance of a useless but valid action
(look, inventory, examine, go and look elsewhere), which leaves something to learn; ``slips`` the
chance of an action that cannot work ("Nothing happens."), without which an imitator never learns
how to go on after one. With every action comes what a thought about it could say: the situation,
what was tried, the plan.
"""

import random
import re
from dataclasses import dataclass

from agent_system.environments.env import Observation
from agent_system.environments.env_package.alfworld.prompts import task_of
from agent_system.environments.expert_protocol import Decision, Noise

_THING = re.compile(r"an? ([a-z]+ \d+)")
# Matched in full, so that no sentence of the templates fits two kinds.
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
# Places to go to by mistake, where a room lacks them.
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
    """A task sentence, understood: task type, object class, class of the place, class of the lamp
    ("" where none).
    """

    kind: str
    object: str
    place: str
    lamp: str


def understand(sentence: str) -> TaskGoal:
    """Read a task sentence of the wheel's templates.

    Raises ``ValueError`` for any other sentence.
    """
    for kind, pattern in _SENTENCES:
        found = pattern.fullmatch(sentence)
        if found:
            parts = found.groupdict()
            return TaskGoal(kind, parts["object"], parts.get("place", ""), parts.get("lamp", ""))
    raise ValueError(f"not a task sentence of ALFWorld's templates: {sentence!r}")


def cls(name: str) -> str:
    """``mug 2`` -> ``mug``."""
    return name.rsplit(" ", 1)[0]


class AlfworldPlayer:
    """Plays one episode: ``act`` chooses, ``observe`` is told what came of it."""

    def __init__(self, first_text: str, rng: random.Random, noise: Noise | None = None) -> None:
        self.asked = understand(task_of(first_text))
        self.rng = rng
        self.noise = noise or Noise()
        self.room = _THING.findall(first_text.split("you see", 1)[1].split("Your task", 1)[0])
        # Receptacle -> what lies there, in order of first sight.
        self.seen: dict[str, set[str]] = {}
        self.closed: set[str] = set()
        self.placed: set[str] = set()
        self.at: str | None = None
        self.held: str | None = None
        self.origin = ""
        self.treated = False
        self.home: str | None = None  # the receptacle the first of two objects went into
        self.failed = ""  # the last action, where nothing happened

    def act(self) -> Decision:
        """The next action."""
        decision = self._decide()
        # One draw decides on both kinds of noise, so that their shares add up and never meet.
        draw = self.rng.random()
        if draw < self.noise.slips:
            return self._slip(decision)
        dawdles = draw < self.noise.slips + self.noise.slack
        return self._dawdle(decision) if dawdles else decision

    def observe(self, action: str, observation: Observation) -> None:
        """Take in the engine's answer to ``action``."""
        text = observation.text
        self.failed = action if text.startswith("Nothing happens") else ""
        if self.failed:
            if action.startswith("go to ") and action.removeprefix("go to ") in self.room:
                # It is used from where one already stands.
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
            # Closed and seen exclude each other: what was opened shows what is inside.
            self.closed.discard(self.at)
            self.seen[self.at] = set(_THING.findall(text.split("you see", 1)[1]))

    # Deciding

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
        # A copy of the class may have been put there already: it does not count as found.
        found = self._find(self.asked.object)
        if found is None:
            return self._search(f"need {self.asked.object}")
        name, place = found
        take = f"take {name} from {place}"
        situation = f"{name} in {place}"
        return (
            self._say(take, situation, take)
            if self.at == place
            else self._go(place, take, situation)
        )

    def _light(self) -> Decision:
        found = self._find(self.asked.lamp)
        if found is None:
            return self._search(f"hold {self.held} need {self.asked.lamp}")
        lamp, place = found
        use = f"use {lamp}"
        situation = f"{lamp} in {place}"
        return (
            self._say(use, situation, use) if self.at == place else self._go(place, use, situation)
        )

    def _find(self, wanted: str) -> tuple[str, str] | None:
        """An object of the class seen where it is not wanted, nearest first."""
        # Stable: among the others the order of first sight stays.
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
        """Somewhere not yet looked into; where the object is wanted comes last."""
        unseen = [place for place in self.room if place not in self.seen]
        likely = [place for place in unseen if cls(place) != self.asked.place]
        elsewhere = [place for place in self.room if place != self.at]
        place = self.rng.choice(likely or unseen or elsewhere or self.room)
        return self._go(
            place, f"look for {self.asked.lamp if self.held else self.asked.object}", situation
        )

    def _nearest(self, wanted: str) -> str:
        """A receptacle of the class: the one used before, one that needs no opening, or any."""
        places = [place for place in self.room if cls(place) == wanted]
        if not places:
            raise ValueError(f"there is no {wanted} in {self.room}")
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
        """A valid action that brings the task no further."""
        options = ["look", "inventory"]
        if self.at is not None:
            options += [f"examine {self.at}"]
        elsewhere = [place for place in self.room if place != self.at]
        if elsewhere:
            options += [f"go to {self.rng.choice(elsewhere)}"]
        action = self.rng.choice(options)
        return Decision(action, decision.situation, decision.tried, action, slack=True)

    def _slip(self, decision: Decision) -> Decision:
        """An action that cannot work here: to where one is, to what is not in the room, or at the
        wrong place.
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
        """A receptacle the object cannot be taken from now: the one at hand, unless it may well lie
        there.
        """
        lies_here = any(cls(name) == self.asked.object for name in self.seen.get(here, ()))
        others = [place for place in self.room if place != here]
        return self.rng.choice(others) if lies_here and others else here
