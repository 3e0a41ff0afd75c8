"""Expert (scripted policy) for the six task types of ALFWorld.

It uses the observations only: no planner and no game files. It visits one receptacle after another,
opens closed ones, and remembers the objects it saw. With each action it returns three texts for a
thought: the situation, earlier attempts, and the plan.

Noise makes demonstrations imperfect in two ways:

- ``useless_share``: probability of a valid action that is useless (look, inventory, examine, go).
  Reinforcement learning can then improve on the demonstrations.
- ``invalid_share``: probability of an action that gives "Nothing happens.". Imitation can then
  learn to recover from an invalid action.
"""

import random
import re
from dataclasses import replace

from agent_system.environments.env import Observation
from agent_system.environments.env_package.alfworld.prompts import extract_task
from agent_system.environments.env_package.alfworld.settings import TaskGoal
from agent_system.environments.expert_protocol import Decision, Noise

_OBJECT_NAME_PATTERN = re.compile(r"an? ([a-z]+ \d+)")
# Patterns must match the full sentence, so that exactly one pattern matches each task sentence.
_TASK_SENTENCE_PATTERNS = {
    "light": r"(?:look at|examine the) (?P<object>\w+) (?:under|with) the (?P<lamp>\w+)",
    "two": r"(?:put|find) two (?P<object>\w+) (?:and put them )?in (?P<place>\w+)",
    "clean": r"(?:put a clean|clean some) (?P<object>\w+) (?:and put it )?in (?P<place>\w+)",
    "heat": r"(?:put a hot|heat some) (?P<object>\w+) (?:and put it )?in (?P<place>\w+)",
    "cool": r"(?:put a cool|cool some) (?P<object>\w+) (?:and put it )?in (?P<place>\w+)",
    "pick": r"put (?:a|some) (?P<object>\w+) (?:in|on) (?P<place>\w+)",
}
# Receptacle classes for the invalid actions of demonstration noise. Example of such an action: go
# to a receptacle that the room does not have.
_FURNITURE_CLASSES = (
    *("bed", "cabinet", "countertop", "desk", "drawer", "dresser"),
    *("fridge", "shelf", "sidetable", "toilet"),
)
TOOL_CLASSES = {"clean": "sinkbasin", "heat": "microwave", "cool": "fridge"}


def parse_task(sentence: str) -> TaskGoal:
    """Parse a task sentence, such as "put a mug in desk".

    Raises ``ValueError`` for sentences in another form.
    """
    for task_type, pattern in _TASK_SENTENCE_PATTERNS.items():
        match = re.fullmatch(pattern, sentence)
        if match:
            fields = match.groupdict("")
            return TaskGoal(
                task_type, fields["object"], fields.get("place", ""), fields.get("lamp", "")
            )
    raise ValueError(f"{sentence!r} is not a task sentence of ALFWorld's templates")


def get_object_class(name: str) -> str:
    """Return the class of an object or receptacle: ``mug 2`` gives ``mug``."""
    return name.rsplit(" ", 1)[0]


class AlfworldExpert:
    """Scripted policy for one episode of ALFWorld, which becomes a demonstration."""

    def __init__(self, first_text: str, rng: random.Random, noise: Noise | None = None) -> None:
        self.goal = parse_task(extract_task(first_text))
        self.rng = rng
        self.noise = noise or Noise()
        self.room_receptacles = _OBJECT_NAME_PATTERN.findall(
            first_text.split("you see", 1)[1].split("Your task", 1)[0]
        )
        # Maps each visited receptacle to the objects last seen there, in the order of first visits.
        self.seen_contents: dict[str, set[str]] = {}
        self.closed_receptacles: set[str] = set()
        self.placed_objects: set[str] = set()
        self.location: str | None = None
        self.held_object: str | None = None
        self.origin_receptacle = ""
        self.is_tool_used = False
        self.last_target_receptacle: str | None = None  # where the last object was placed
        self.failed_action = ""  # the last action, if the answer was "Nothing happens."

    @property
    def needed_tool(self) -> str:
        """Class of the tool that the held object still needs, such as ``fridge``; "" for none."""
        return "" if self.is_tool_used else TOOL_CLASSES.get(self.goal.task_type, "")

    def act(self) -> Decision:
        decision = self._choose_action()
        random_number = self.rng.random()
        if random_number < self.noise.invalid_share:
            return self._draw_invalid_action(decision)
        is_useless = random_number < self.noise.invalid_share + self.noise.useless_share
        return self._draw_useless_action(decision) if is_useless else decision

    def observe(self, action: str, observation: Observation) -> None:
        text = observation.text
        self.failed_action = action if text.startswith("Nothing happens") else ""
        if self.failed_action:
            if (
                action.startswith("go to ")
                and action.removeprefix("go to ") in self.room_receptacles
            ):
                # The move failed because the agent is already at the location of this receptacle.
                # Several receptacles can share a location.
                self.location = action.removeprefix("go to ")
            return
        verb = action.split(" ", 1)[0]
        if verb == "go":
            self.location = action.removeprefix("go to ")
        elif verb == "take":
            self.held_object, self.origin_receptacle = action.removeprefix("take ").split(" from ")
            self.is_tool_used = False
            self.seen_contents.get(self.origin_receptacle, set()).discard(self.held_object)
        elif verb == "move":
            placed_object, self.last_target_receptacle = action.removeprefix("move ").split(" to ")
            self.held_object = None
            self.placed_objects.add(placed_object)
            self.seen_contents.setdefault(self.last_target_receptacle, set()).add(placed_object)
        elif verb in TOOL_CLASSES:
            self.is_tool_used = True
        self._update_seen_contents(verb, text)

    def _update_seen_contents(self, verb: str, text: str) -> None:
        if self.location is None or verb not in ("go", "open", "examine"):
            return
        if "is closed" in text:
            self.closed_receptacles.add(self.location)
        elif "you see" in text and (verb != "examine" or self.location in text):
            self.closed_receptacles.discard(self.location)
            self.seen_contents[self.location] = set(
                _OBJECT_NAME_PATTERN.findall(text.split("you see", 1)[1])
            )

    # Methods that choose the right action

    def _choose_action(self) -> Decision:
        location = self.location
        if location in self.closed_receptacles:
            return self._make_decision(f"open {location}", f"{location} closed", f"open {location}")
        if location is not None and location not in self.seen_contents:
            return self._make_decision(
                f"examine {location}", f"at {location}", f"examine {location}"
            )
        goal = self.goal
        if self.held_object is None:
            return self._act_on_object(
                goal.object_class, "take {} from {}", f"need {goal.object_class}"
            )
        if self.needed_tool:
            receptacle = self._choose_receptacle(self.needed_tool)
            action = f"{goal.task_type} {self.held_object} with {receptacle}"
        elif goal.lamp_class:
            return self._act_on_object(
                goal.lamp_class, "use {}", f"hold {self.held_object} need {goal.lamp_class}"
            )
        else:
            receptacle = location
            if receptacle is None or get_object_class(receptacle) != goal.receptacle_class:
                receptacle = self._choose_receptacle(goal.receptacle_class)
            action = f"move {self.held_object} to {receptacle}"
        return self._act_at_receptacle(receptacle, action, f"hold {self.held_object}")

    def _act_on_object(
        self, object_class: str, action_template: str, search_situation: str
    ) -> Decision:
        """Return the action on a seen object of ``object_class``, or the move to its receptacle.

        If no such object was seen, return a move to a receptacle that is still to be searched. The
        thought of this move begins with ``search_situation``.
        """
        seen_objects = self._list_seen_objects(object_class)
        if not seen_objects:
            receptacle = self.rng.choice(self._list_search_receptacles())
            return self._go_to(receptacle, f"look for {object_class}", search_situation)
        # Prefer a candidate at the agent's location (False sorts first).
        object_name, receptacle = min(
            seen_objects,
            key=lambda object_and_receptacle: object_and_receptacle[1] != self.location,
        )
        action = action_template.format(object_name, receptacle)
        return self._act_at_receptacle(receptacle, action, f"{object_name} in {receptacle}")

    def _act_at_receptacle(self, receptacle: str, action: str, situation: str) -> Decision:
        if self.location == receptacle:
            return self._make_decision(action, situation, action)
        return self._go_to(receptacle, action, situation)

    def _list_seen_objects(self, object_class: str) -> list[tuple[str, str]]:
        """Return (object, receptacle) pairs of the seen objects of ``object_class``.

        Objects at the destination of the task are excluded. Receptacles are in the order of first
        visits. Objects are in alphabetical order.
        """
        return [
            (name, receptacle)
            for receptacle in self.seen_contents
            for name in sorted(self.seen_contents[receptacle])
            if get_object_class(name) == object_class
            and name not in self.placed_objects
            and get_object_class(receptacle) != self.goal.receptacle_class
        ]

    def _list_search_receptacles(self) -> list[str]:
        """Return the receptacles to search next: those with unknown content.

        Possible destinations of the task are returned only if all other receptacles were searched.
        If the content of all is known, return every receptacle except the agent's location.
        """
        unseen_receptacles = [
            receptacle
            for receptacle in self.room_receptacles
            if receptacle not in self.seen_contents
        ]
        non_target_receptacles = [
            receptacle
            for receptacle in unseen_receptacles
            if get_object_class(receptacle) != self.goal.receptacle_class
        ]
        return (
            non_target_receptacles
            or unseen_receptacles
            or self._list_other_receptacles()
            or self.room_receptacles
        )

    def _list_other_receptacles(self) -> list[str]:
        return [receptacle for receptacle in self.room_receptacles if receptacle != self.location]

    def _list_receptacles_of_class(self, receptacle_class: str) -> list[str]:
        return [
            receptacle
            for receptacle in self.room_receptacles
            if get_object_class(receptacle) == receptacle_class
        ]

    def _choose_receptacle(self, receptacle_class: str) -> str:
        """Return a receptacle of the class ``receptacle_class``.

        Prefer the receptacle of the last placed object, then a random one whose content is known.
        """
        receptacles_of_class = self._list_receptacles_of_class(receptacle_class)
        if self.last_target_receptacle in receptacles_of_class:
            return self.last_target_receptacle
        seen_receptacles = [
            receptacle for receptacle in receptacles_of_class if receptacle in self.seen_contents
        ]
        return self.rng.choice(seen_receptacles or receptacles_of_class)

    def _go_to(self, receptacle: str, next_action: str, situation: str) -> Decision:
        return self._make_decision(
            f"go to {receptacle}", situation, f"go to {receptacle} then {next_action}"
        )

    def _make_decision(self, action: str, situation: str, plan: str) -> Decision:
        if self.failed_action:
            tried_text = f"failed {self.failed_action}"
        elif self.held_object is None:
            tried_text = f"tried {', '.join(self.seen_contents) or 'nothing'}"
        else:
            tried_text = f"took from {self.origin_receptacle}"
        return Decision(action, situation, tried_text, plan)

    # Methods that draw a wrong action as noise

    def _draw_useless_action(self, decision: Decision) -> Decision:
        useless_actions = ["look", "inventory"]
        if self.location is not None:
            useless_actions.append(f"examine {self.location}")
        if other_receptacles := self._list_other_receptacles():
            useless_actions.append(f"go to {self.rng.choice(other_receptacles)}")
        useless_action = self.rng.choice(useless_actions)
        return replace(decision, action=useless_action, plan=useless_action, is_useless=True)

    def _draw_invalid_action(self, decision: Decision) -> Decision:
        """Return a random invalid action, to which the engine answers "Nothing happens."."""
        absent_classes = [
            class_name
            for class_name in _FURNITURE_CLASSES
            if class_name not in map(get_object_class, self.room_receptacles)
        ]
        invalid_actions = [f"go to {self.rng.choice(absent_classes)} 1"]
        if self.location is not None:
            invalid_actions.append(f"go to {self.location}")
        if self.held_object is not None:
            target_receptacles = self._list_other_receptacles() or self.room_receptacles
            invalid_actions.append(
                f"move {self.held_object} to {self.rng.choice(target_receptacles)}"
            )
        else:
            object_class = self.goal.object_class
            receptacle = self.location or self.room_receptacles[0]
            other_receptacles = [name for name in self.room_receptacles if name != receptacle]
            # The action must be invalid. Taking an object that is in the receptacle would succeed.
            if other_receptacles and object_class in map(
                get_object_class, self.seen_contents.get(receptacle, ())
            ):
                receptacle = self.rng.choice(other_receptacles)
            invalid_actions.append(f"take {object_class} 1 from {receptacle}")
        invalid_action = self.rng.choice(invalid_actions)
        return replace(decision, action=invalid_action, plan=invalid_action, is_invalid=True)
