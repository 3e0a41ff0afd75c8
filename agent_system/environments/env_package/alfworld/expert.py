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

from agent_system.environments.env import Observation
from agent_system.environments.env_package.alfworld.prompts import extract_task
from agent_system.environments.env_package.alfworld.settings import TaskGoal
from agent_system.environments.expert_protocol import Decision, Noise

_OBJECT_NAME = re.compile(r"an? ([a-z]+ \d+)")
# Patterns must match the full sentence, so that exactly one pattern matches each task sentence.
_SENTENCES = {
    "light": r"(?:look at|examine the) (?P<object>\w+) (?:under|with) the (?P<lamp>\w+)",
    "two": r"(?:put|find) two (?P<object>\w+) (?:and put them )?in (?P<place>\w+)",
    "clean": r"(?:put a clean|clean some) (?P<object>\w+) (?:and put it )?in (?P<place>\w+)",
    "heat": r"(?:put a hot|heat some) (?P<object>\w+) (?:and put it )?in (?P<place>\w+)",
    "cool": r"(?:put a cool|cool some) (?P<object>\w+) (?:and put it )?in (?P<place>\w+)",
    "pick": r"put (?:a|some) (?P<object>\w+) (?:in|on) (?P<place>\w+)",
}
# Receptacle classes for invalid actions: the expert goes to one that the room does not have.
_FURNITURE = (
    *("bed", "cabinet", "countertop", "desk", "drawer", "dresser"),
    *("fridge", "shelf", "sidetable", "toilet"),
)
TOOL_CLASSES = {"clean": "sinkbasin", "heat": "microwave", "cool": "fridge"}


def parse_task(sentence: str) -> TaskGoal:
    """Parse a task sentence of the wheel's templates. Raises ``ValueError`` for any other one."""
    for task_type, pattern in _SENTENCES.items():
        match = re.fullmatch(pattern, sentence)
        if match:
            fields = match.groupdict("")
            return TaskGoal(
                task_type, fields["object"], fields.get("place", ""), fields.get("lamp", "")
            )
    raise ValueError(f"{sentence!r} is not a task sentence of ALFWorld's templates")


def class_of(name: str) -> str:
    """Return the class of an object or receptacle: ``mug 2`` gives ``mug``."""
    return name.rsplit(" ", 1)[0]


class AlfworldExpert:
    """Expert of one episode: ``act`` returns an action, ``observe`` receives the answer to it."""

    def __init__(self, first_text: str, rng: random.Random, noise: Noise | None = None) -> None:
        self.goal = parse_task(extract_task(first_text))
        self.rng = rng
        self.noise = noise or Noise()
        self.room = _OBJECT_NAME.findall(first_text.split("you see", 1)[1].split("Your task", 1)[0])
        # Receptacle -> objects there, in the order of the first visits.
        self.seen: dict[str, set[str]] = {}
        self.closed: set[str] = set()
        self.placed: set[str] = set()
        self.location: str | None = None
        self.held: str | None = None
        self.origin = ""
        self.is_treated = False
        self.last_target: str | None = None  # receptacle of the object that was placed last
        self.failed_action = ""  # the last action, if the answer was "Nothing happens."

    @property
    def needed_tool(self) -> str:
        """Class of the tool that the held object still needs; "" if it needs none."""
        return "" if self.is_treated else TOOL_CLASSES.get(self.goal.task_type, "")

    def act(self) -> Decision:
        """Return the next action. Noise may replace it by a useless or an invalid one."""
        decision = self._choose_action()
        # One random number decides both kinds of noise, so at most one of them is applied.
        random_number = self.rng.random()
        if random_number < self.noise.invalid_share:
            return self._invalid_action(decision)
        is_useless = random_number < self.noise.invalid_share + self.noise.useless_share
        return self._useless_action(decision) if is_useless else decision

    def observe(self, action: str, observation: Observation) -> None:
        """Update the remembered state from the engine's answer to ``action``."""
        text = observation.text
        self.failed_action = action if text.startswith("Nothing happens") else ""
        if self.failed_action:
            if action.startswith("go to ") and action.removeprefix("go to ") in self.room:
                # The agent is already at this location: several receptacles can share one.
                self.location = action.removeprefix("go to ")
            return
        verb = action.split(" ", 1)[0]
        if verb == "go":
            self.location = action.removeprefix("go to ")
        elif verb == "take":
            self.held, self.origin = action.removeprefix("take ").split(" from ")
            self.is_treated = False
            self.seen.get(self.origin, set()).discard(self.held)
        elif verb == "move":
            name, self.last_target = action.removeprefix("move ").split(" to ")
            self.held = None
            self.placed.add(name)
            self.seen.setdefault(self.last_target, set()).add(name)
        elif verb in TOOL_CLASSES:
            self.is_treated = True
        self._update_seen(verb, text)

    def _update_seen(self, verb: str, text: str) -> None:
        if self.location is None or verb not in ("go", "open", "examine"):
            return
        if "is closed" in text:
            self.closed.add(self.location)
        elif "you see" in text and (verb != "examine" or self.location in text):
            # An opened receptacle is no longer in ``closed``: its content is in the text.
            self.closed.discard(self.location)
            self.seen[self.location] = set(_OBJECT_NAME.findall(text.split("you see", 1)[1]))

    # Decisions without noise

    def _choose_action(self) -> Decision:
        place = self.location
        if place in self.closed:
            return self._make_decision(f"open {place}", f"{place} closed", f"open {place}")
        if place is not None and place not in self.seen:
            return self._make_decision(f"examine {place}", f"at {place}", f"examine {place}")
        goal = self.goal
        if self.held is None:
            return self._act_on_object(
                goal.object_class, "take {} from {}", f"need {goal.object_class}"
            )
        if self.needed_tool:
            receptacle = self._choose_receptacle(self.needed_tool)
            action = f"{goal.task_type} {self.held} with {receptacle}"
        elif goal.lamp_class:
            return self._act_on_object(
                goal.lamp_class, "use {}", f"hold {self.held} need {goal.lamp_class}"
            )
        elif place is not None and class_of(place) == goal.receptacle_class:
            receptacle = place
            action = f"move {self.held} to {receptacle}"
        else:
            receptacle = self._choose_receptacle(goal.receptacle_class)
            action = f"move {self.held} to {receptacle}"
        return self._act_at(receptacle, action, f"hold {self.held}")

    def _act_on_object(self, object_class: str, action_template: str, need: str) -> Decision:
        """Return the action on a seen object of the class, or a move towards it.

        Without one, search a receptacle, with ``need`` as situation. The agent's location is
        preferred, then the receptacles in the order of the first visits.
        """
        candidates = self._seen_objects(object_class)
        if not candidates:
            place = self.rng.choice(self._list_search_places())
            return self._go_to(place, f"look for {object_class}", need)
        # ``min`` returns the first of equal candidates.
        name, receptacle = min(candidates, key=lambda candidate: candidate[1] != self.location)
        action = action_template.format(name, receptacle)
        return self._act_at(receptacle, action, f"{name} in {receptacle}")

    def _act_at(self, receptacle: str, action: str, situation: str) -> Decision:
        """Return ``action`` if the agent is at ``receptacle``, else the move to it."""
        if self.location == receptacle:
            return self._make_decision(action, situation, action)
        return self._go_to(receptacle, action, situation)

    def _seen_objects(self, object_class: str) -> list[tuple[str, str]]:
        """Return (object, receptacle) for the seen objects of the class that are not at a target.

        The receptacles are in the order of the first visits, the objects of each in alphabetical
        order.
        """
        return [
            (name, receptacle)
            for receptacle in self.seen
            for name in sorted(self.seen[receptacle])
            if class_of(name) == object_class
            and name not in self.placed
            and class_of(receptacle) != self.goal.receptacle_class
        ]

    def _list_search_places(self) -> list[str]:
        """Return the receptacles to search: those with unknown content.

        Receptacles of the target class are among them only if no other is left. If all were
        visited, return those where the agent is not.
        """
        unseen = [receptacle for receptacle in self.room if receptacle not in self.seen]
        likely = [place for place in unseen if class_of(place) != self.goal.receptacle_class]
        return likely or unseen or self._list_other_places() or self.room

    def _list_other_places(self) -> list[str]:
        return [receptacle for receptacle in self.room if receptacle != self.location]

    def _choose_receptacle(self, receptacle_class: str) -> str:
        """Return a receptacle of the class ``receptacle_class``.

        It is the one where an object was placed last, else one whose content is known, else any.
        Raises ``ValueError`` if the room has none.
        """
        candidates = [
            receptacle for receptacle in self.room if class_of(receptacle) == receptacle_class
        ]
        if not candidates:
            raise ValueError(f"the room has no {receptacle_class!r}; its receptacles: {self.room}")
        if self.last_target is not None and self.last_target in candidates:
            return self.last_target
        opened = [place for place in candidates if place in self.seen]
        return self.rng.choice(opened or candidates)

    def _go_to(self, place: str, next_action: str, situation: str) -> Decision:
        return self._make_decision(f"go to {place}", situation, f"go to {place} then {next_action}")

    def _make_decision(self, action: str, situation: str, plan: str) -> Decision:
        if self.failed_action:
            tried = f"failed {self.failed_action}"
        elif self.held is None:
            tried = f"tried {', '.join(self.seen) or 'nothing'}"
        else:
            tried = f"took from {self.origin}"
        return Decision(action, situation, tried, plan)

    # Noise

    def _useless_action(self, decision: Decision) -> Decision:
        """Return a random valid action that does not advance the task."""
        options = ["look", "inventory"]
        if self.location is not None:
            options.append(f"examine {self.location}")
        if elsewhere := self._list_other_places():
            options.append(f"go to {self.rng.choice(elsewhere)}")
        action = self.rng.choice(options)
        return Decision(action, decision.situation, decision.tried, action, is_useless=True)

    def _invalid_action(self, decision: Decision) -> Decision:
        """Return a random invalid action.

        It goes to the present place or to a receptacle that the room lacks, or it moves or takes an
        object at a wrong place.
        """
        absent = [name for name in _FURNITURE if name not in map(class_of, self.room)]
        options = [f"go to {self.rng.choice(absent)} 1"]
        if self.location is not None:
            options.append(f"go to {self.location}")
        if self.held is not None:
            elsewhere = self._list_other_places() or self.room
            options.append(f"move {self.held} to {self.rng.choice(elsewhere)}")
        else:
            object_class = self.goal.object_class
            receptacle = self.location or self.room[0]
            others = [other for other in self.room if other != receptacle]
            # If an object of the class was seen here, taking one would succeed.
            if others and object_class in map(class_of, self.seen.get(receptacle, ())):
                receptacle = self.rng.choice(others)
            options.append(f"take {object_class} 1 from {receptacle}")
        action = self.rng.choice(options)
        return Decision(action, decision.situation, decision.tried, action, is_invalid=True)
