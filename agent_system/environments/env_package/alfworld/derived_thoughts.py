"""Thoughts that derive from the prompt the facts that the action needs (``thoughts=carried``).

With ``env.history=window`` a prompt shows the observations so far in their order, and no earlier
thought. A thought states facts and never an action:

- Level 1: nothing.
- Level 2: the held object, as in ``hold nothing.``
- Level 3: also where the wanted object was seen, or where the held one goes, as in ``mug unseen.``
- Level 4: also the receptacles in room order, up to the first that was not visited, as in
  ``cabinet 2 done, desk 1 goal, shelf 1 left.``

A level writes all its parts in every state. The parts that the action needs depend on the state:
the expert names the kind of the state and the lowest sufficient level.
"""

from dataclasses import dataclass, replace

from agent_system.environments.env_package.alfworld.expert import AlfworldExpert, class_of
from agent_system.environments.expert_protocol import Decision, Thought
from rlvcr.levels import LEVELS

# By kind of the right action: the lowest level whose thought states all facts that it needs.
NEEDED_LEVELS = {
    "open": 1,  # open the closed receptacle where the agent is
    "look": 1,  # examine the receptacle where the agent is
    "take": 1,  # take an object where the agent is
    "begin": 1,  # no receptacle was visited yet: going to any one is right
    "put": 2,  # put the held object down where the agent is
    "use": 2,
    "bring": 3,  # go to the receptacle for the held object
    "return": 3,  # go to an object that was seen at another receptacle
    "search": 4,  # go to a receptacle that was not visited
}
SEARCH_KINDS = {"begin", "search"}


@dataclass(frozen=True, slots=True)
class RightActions:
    """Kind of the next action (a key of ``NEEDED_LEVELS``), and all right actions of that kind in
    the order in which the first observation lists the receptacles.
    """

    kind: str
    actions: tuple[str, ...]


class DerivedThoughtsExpert(AlfworldExpert):
    """Expert of one episode that writes the thoughts of all levels.

    To search, it goes to a random receptacle. Only the thought of level 4 names the first
    receptacle that was not visited, so the action of that level goes there.
    """

    def act(self) -> Decision:
        """Return the next action with the thought and action of each level."""
        right_actions = self.find_right_actions()
        decision = super().act()
        sentences = (self._describe_held_object(), self._describe_target(), self._describe_visits())
        thoughts = {
            level: Thought(
                " ".join(f"{sentence}." for sentence in sentences[: level - 1]), decision.action
            )
            for level in LEVELS
        }
        # Only the thought of level 4 names the first receptacle that was not visited.
        if (
            right_actions.kind in SEARCH_KINDS
            and not decision.is_useless
            and not decision.is_invalid
        ):
            thoughts[4] = replace(thoughts[4], action=right_actions.actions[0])
        return replace(
            decision,
            thoughts=thoughts,
            needed_level=NEEDED_LEVELS[right_actions.kind],
            right_actions=right_actions.actions,
        )

    def find_right_actions(self) -> RightActions:
        """Return all right actions in this state. They depend on the observations only."""
        location = self.location
        if location in self.closed:
            return RightActions("open", (f"open {location}",))
        if location is not None and location not in self.seen:
            return RightActions("look", (f"examine {location}",))
        if self.held is None:
            return self._right_actions_for_object(self.goal.object_class, "take {} from {}")
        if class_of(self.held) != self.goal.object_class:
            return RightActions("put", (f"move {self.held} to {location}",))
        if self.needed_tool:
            return self._right_actions_at(
                self.needed_tool, "use", f"{self.goal.task_type} {self.held} with {{}}"
            )
        if self.goal.lamp_class:
            return self._right_actions_for_object(self.goal.lamp_class, "use {}")
        return self._right_actions_at(
            self.goal.receptacle_class, "put", f"move {self.held} to {{}}"
        )

    def _right_actions_for_object(self, object_class: str, action_template: str) -> RightActions:
        """Return the right actions to take or use an object of class ``object_class``.

        These are ``action_template`` with the object if it is at the agent's location. Otherwise
        they go to a receptacle where one was seen, or else to one that was not visited.
        """
        candidates = self._seen_objects(object_class)
        names = [name for name, receptacle in candidates if receptacle == self.location]
        if names:
            actions = tuple(action_template.format(name, self.location) for name in names)
            return RightActions("take" if self.held is None else "use", actions)
        if candidates:
            receptacles = dict.fromkeys(receptacle for _, receptacle in candidates)
            return RightActions("return", tuple(f"go to {place}" for place in receptacles))
        # If all receptacles were visited without success, going to any other one is right.
        return RightActions(
            "search" if self.seen else "begin",
            tuple(f"go to {place}" for place in self._list_search_places()),
        )

    def _right_actions_at(
        self, receptacle_class: str, kind: str, action_template: str
    ) -> RightActions:
        """Return ``action_template`` at a receptacle of the class, else the moves to one."""
        targets = self._target_receptacles(receptacle_class)
        if self.location in targets:
            return RightActions(kind, (action_template.format(self.location),))
        return RightActions("bring", tuple(f"go to {target}" for target in targets))

    def _target_receptacles(self, receptacle_class: str) -> list[str]:
        """Return the receptacles of the class.

        Once an object was placed in one of them, return only that one: a task with two objects
        needs both in the same receptacle.
        """
        if self.last_target is not None and class_of(self.last_target) == receptacle_class:
            return [self.last_target]
        return [receptacle for receptacle in self.room if class_of(receptacle) == receptacle_class]

    def _seen_objects(self, object_class: str) -> list[tuple[str, str]]:
        """Return the objects of the base class in another order.

        Objects at the agent's location come first, then those at other receptacles in room order.
        Within a receptacle the order is that of the engine's text: descending numbers.
        """

        def sort_key(candidate: tuple[str, str]) -> tuple[bool, int, int]:
            name, place = candidate
            number = int(name.rsplit(" ", 1)[1])
            return place != self.location, self.room.index(place), -number

        return sorted(super()._seen_objects(object_class), key=sort_key)

    def _choose_action(self) -> Decision:
        right_actions = self.find_right_actions()
        if right_actions.kind in SEARCH_KINDS:
            return Decision(self.rng.choice(right_actions.actions))
        return Decision(right_actions.actions[0])

    # Parts of the thoughts

    def _describe_held_object(self) -> str:
        held = f"hold {self.held or 'nothing'}"
        return f"{held}, {len(self.placed)} home" if self.placed else held

    def _describe_target(self) -> str:
        if self.held is not None and not self.goal.lamp_class:
            # The tool comes before the target receptacle.
            targets = self._target_receptacles(self.needed_tool or self.goal.receptacle_class)
            return f"to {self.location if self.location in targets else targets[0]}"
        object_class = self.goal.object_class if self.held is None else self.goal.lamp_class
        for name, receptacle in self._seen_objects(object_class):
            return f"{name} in {receptacle}"
        return f"{object_class} unseen"

    def _describe_visits(self) -> str:
        """Return ``done``, ``goal`` or ``left`` by receptacle, up to the first ``left``."""
        visit_notes = []
        for receptacle in self.room:
            if receptacle in self.seen:
                visit_notes.append(f"{receptacle} done")
            elif class_of(receptacle) == self.goal.receptacle_class:
                visit_notes.append(f"{receptacle} goal")
            else:
                return ", ".join([*visit_notes, f"{receptacle} left"])
        return ", ".join(visit_notes)
