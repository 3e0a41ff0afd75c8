"""Expert (scripted policy) whose thoughts state the facts that its next action needs.

It makes the demonstrations for ``env.alfworld.thoughts=carried``. Its thoughts derive the facts
from the prompt. With ``env.history=window`` a prompt shows all earlier observations in order, and
no earlier thought. A thought states facts and never an action. It depends on the thinking level:

- Level 1: nothing.
- Level 2: the held object, as in ``hold nothing.``
- Level 3: also the receptacle that contains the wanted object, or the destination of the held
  object. ``mug unseen.`` means that no mug was seen yet.
- Level 4: also the receptacles in the order of the first observation, up to the first one that is
  still to be searched, as in ``cabinet 2 done, desk 1 goal, shelf 1 left.``

A thought contains all facts of its level in every state. The state determines which facts the next
action needs. The expert therefore labels each state with the lowest level that suffices.
"""

from dataclasses import dataclass, replace

from agent_system.environments.env_package.alfworld.expert import AlfworldExpert, get_object_class
from agent_system.environments.expert_protocol import Decision, Thought
from rlvcr.levels import LEVELS

# Maps each kind of right action to the lowest thinking level whose thought states all facts that
# the action needs.
NEEDED_LEVELS = {
    "open": 1,  # open the closed receptacle where the agent is
    "look": 1,  # examine the receptacle where the agent is
    "take": 1,  # take an object where the agent is
    "begin": 1,  # go to any receptacle: none was visited yet
    "put": 2,  # put the held object down where the agent is
    "use": 2,  # use the tool or the lamp where the agent is
    "bring": 3,  # go to the tool or to the target receptacle with the held object
    "return": 3,  # go to an object that was seen at another receptacle
    "search": 4,  # go to a receptacle that was not visited
}
SEARCH_SITUATIONS = {"begin", "search"}


@dataclass(frozen=True, slots=True)
class RightActions:
    """All right actions in a state, in the order of the receptacles in the first observation.

    ``situation`` is the kind of these actions: a key of ``NEEDED_LEVELS``.
    """

    situation: str
    actions: tuple[str, ...]


class DerivedThoughtsExpert(AlfworldExpert):
    """Scripted policy for one episode. It writes a thought for each thinking level (1 to 4).

    When it searches for an object, its action at levels 1 to 3 goes to a random receptacle. At
    level 4 the action goes to the first receptacle that was not visited: only the thought of this
    level names that receptacle.
    """

    def act(self) -> Decision:
        right_actions = self.find_right_actions()
        decision = super().act()
        sentences = (self._describe_held_object(), self._describe_target(), self._describe_visits())
        thoughts = {
            level: Thought(
                " ".join(f"{sentence}." for sentence in sentences[: level - 1]), decision.action
            )
            for level in LEVELS
        }
        if (
            right_actions.situation in SEARCH_SITUATIONS
            and not decision.is_useless
            and not decision.is_invalid
        ):
            thoughts[4] = replace(thoughts[4], action=right_actions.actions[0])
        return replace(
            decision,
            thoughts=thoughts,
            needed_level=NEEDED_LEVELS[right_actions.situation],
            right_actions=right_actions.actions,
        )

    def find_right_actions(self) -> RightActions:
        """Return all actions that advance the task, according to the observations so far."""
        location = self.location
        if location in self.closed_receptacles:
            return RightActions("open", (f"open {location}",))
        if location is not None and location not in self.seen_contents:
            return RightActions("look", (f"examine {location}",))
        if self.held_object is None:
            return self._find_object_actions(self.goal.object_class, "take {} from {}")
        if get_object_class(self.held_object) != self.goal.object_class:
            return RightActions("put", (f"move {self.held_object} to {location}",))
        if self.needed_tool:
            return self._find_receptacle_actions(
                self.needed_tool, "use", f"{self.goal.task_type} {self.held_object} with {{}}"
            )
        if self.goal.lamp_class:
            return self._find_object_actions(self.goal.lamp_class, "use {}")
        return self._find_receptacle_actions(
            self.goal.receptacle_class, "put", f"move {self.held_object} to {{}}"
        )

    def _find_object_actions(self, object_class: str, action_template: str) -> RightActions:
        """Return the right actions to take or use an object of class ``object_class``.

        If such objects are at the agent's location, ``action_template`` is filled in with each of
        them. Otherwise the actions are moves to the receptacles where one was seen. If none was
        seen, they are moves to the receptacles that are still to be searched.
        """
        seen_objects = self._list_seen_objects(object_class)
        actions = tuple(
            action_template.format(object_name, receptacle)
            for object_name, receptacle in seen_objects
            if receptacle == self.location
        )
        if actions:
            return RightActions("take" if self.held_object is None else "use", actions)
        if seen_objects:
            receptacles = dict.fromkeys(receptacle for _, receptacle in seen_objects)
            return RightActions(
                "return", tuple(f"go to {receptacle}" for receptacle in receptacles)
            )
        return RightActions(
            "search" if self.seen_contents else "begin",
            tuple(f"go to {receptacle}" for receptacle in self._list_search_receptacles()),
        )

    def _find_receptacle_actions(
        self, receptacle_class: str, situation: str, action_template: str
    ) -> RightActions:
        """Return the right actions to go to a receptacle of ``receptacle_class`` and act there.

        If the agent is at such a receptacle, the action is ``action_template`` with its name, of
        the kind ``situation``. Otherwise the actions are the moves to such receptacles.
        """
        target_receptacles = self._list_target_receptacles(receptacle_class)
        if self.location in target_receptacles:
            return RightActions(situation, (action_template.format(self.location),))
        return RightActions("bring", tuple(f"go to {target}" for target in target_receptacles))

    def _list_target_receptacles(self, receptacle_class: str) -> list[str]:
        """Return the receptacles of ``receptacle_class``.

        A task with two objects needs both in the same receptacle: once one was placed, return only
        its receptacle.
        """
        if (
            self.last_target_receptacle is not None
            and get_object_class(self.last_target_receptacle) == receptacle_class
        ):
            return [self.last_target_receptacle]
        return self._list_receptacles_of_class(receptacle_class)

    def _list_seen_objects(self, object_class: str) -> list[tuple[str, str]]:
        """Return (object, receptacle) pairs of the seen objects of ``object_class``.

        Objects at the agent's location come first. Then the order is that of the receptacles in the
        first observation. Within a receptacle, object numbers descend, as in the engine's text.
        """

        def get_sort_key(object_and_receptacle: tuple[str, str]) -> tuple[bool, int, int]:
            object_name, receptacle = object_and_receptacle
            room_position = self.room_receptacles.index(receptacle)
            return receptacle != self.location, room_position, -int(object_name.rsplit(" ", 1)[1])

        return sorted(super()._list_seen_objects(object_class), key=get_sort_key)

    def _choose_action(self) -> Decision:
        right_actions = self.find_right_actions()
        if right_actions.situation in SEARCH_SITUATIONS:
            return Decision(self.rng.choice(right_actions.actions))
        return Decision(right_actions.actions[0])

    # Sentences of the thoughts, one for each level from 2 to 4

    def _describe_held_object(self) -> str:
        held_text = f"hold {self.held_object or 'nothing'}"
        return f"{held_text}, {len(self.placed_objects)} home" if self.placed_objects else held_text

    def _describe_target(self) -> str:
        if self.held_object is not None and not self.goal.lamp_class:
            target_receptacles = self._list_target_receptacles(
                self.needed_tool or self.goal.receptacle_class
            )
            is_at_target = self.location in target_receptacles
            return f"to {self.location if is_at_target else target_receptacles[0]}"
        object_class = self.goal.object_class if self.held_object is None else self.goal.lamp_class
        for object_name, receptacle in self._list_seen_objects(object_class):
            return f"{object_name} in {receptacle}"
        return f"{object_class} unseen"

    def _describe_visits(self) -> str:
        """List the receptacles with a status: ``cabinet 2 done, desk 1 goal, shelf 1 left``.

        ``done``: the content was seen. ``goal``: a destination of the task, content not seen.
        ``left``: still to be searched. The first of these ends the list.
        """
        visit_notes = []
        for receptacle in self.room_receptacles:
            if receptacle in self.seen_contents:
                visit_notes.append(f"{receptacle} done")
            elif get_object_class(receptacle) == self.goal.receptacle_class:
                visit_notes.append(f"{receptacle} goal")
            else:
                return ", ".join([*visit_notes, f"{receptacle} left"])
        return ", ".join(visit_notes)
