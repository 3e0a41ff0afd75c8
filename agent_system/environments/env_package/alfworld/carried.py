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

from agent_system.environments.env_package.alfworld.expert import (
    TOOL,
    AlfworldPlayer,
    cls,
)
from agent_system.environments.expert_protocol import Decision, Thought
from rlvcr.levels import LEVELS

# Kind of the right action, and the lowest level whose thought states all that it needs.
NEEDED = {
    "open": 1,  # the closed receptacle at the present place
    "look": 1,  # at the present place
    "take": 1,  # an object at the present place
    "begin": 1,  # no receptacle was visited yet: any is right
    "put": 2,  # the held object here
    "use": 2,
    "bring": 3,  # the held object to its next place
    "return": 3,  # to an object that was seen elsewhere
    "search": 4,  # in receptacles that were not visited
}
SEARCHES = {"begin", "search"}


@dataclass(frozen=True, slots=True)
class Due:
    """Kind of the right action, and all right actions of that kind, in room order."""

    kind: str
    actions: tuple[str, ...]


class CarriedPlayer(AlfworldPlayer):
    """Expert of one episode with the thoughts of all levels.

    Its searches go to a random receptacle. The action of level 4 goes to the first receptacle that
    was not visited, which its thought names.
    """

    def act(self) -> Decision:
        """Return the next action with the thought and action of each level."""
        right_actions = self.due()
        decision = super().act()
        parts = (self._hand(), self._where(), self._scan())
        thoughts = {
            level: Thought(" ".join(f"{part}." for part in parts[: level - 1]), decision.action)
            for level in LEVELS
        }
        # Only the thought of level 4 names the first receptacle that was not visited.
        if right_actions.kind in SEARCHES and not decision.slack and not decision.slip:
            thoughts[4] = replace(thoughts[4], action=right_actions.actions[0])
        needed_level = NEEDED[right_actions.kind]
        return replace(
            decision, thoughts=thoughts, needed_level=needed_level, right=right_actions.actions
        )

    def due(self) -> Due:
        """Return the right actions in the present state. They follow from the observations alone:
        no draw is used.
        """
        here = self.at
        if here in self.closed:
            return Due("open", (f"open {here}",))
        if here is not None and here not in self.seen:
            return Due("look", (f"examine {here}",))
        if self.held is None:
            return self._due_of_search(self.asked.object, "take {} from {}")
        if cls(self.held) != self.asked.object:
            return Due("put", (f"move {self.held} to {here}",))
        tool = TOOL.get(self.asked.kind)
        if tool and not self.treated:
            return self._due_at(tool, "use", f"{self.asked.kind} {self.held} with {{}}")
        if self.asked.lamp:
            return self._due_of_search(self.asked.lamp, "use {}")
        return self._due_at(self.asked.place, "put", f"move {self.held} to {{}}")

    def _due_of_search(self, wanted: str, use: str) -> Due:
        """Return the right actions towards an object of class ``object_class``.

        They use it if it is here, else go where it was seen, else search.
        """
        candidates = self._copies(wanted)
        names = [name for name, place in candidates if place == self.at]
        if names:
            kind = "take" if self.held is None else "use"
            return Due(kind, tuple(use.format(name, self.at) for name in names))
        if candidates:
            return Due("return", tuple(dict.fromkeys(f"go to {place}" for _, place in candidates)))
        unseen = [place for place in self.room if place not in self.seen]
        likely = [place for place in unseen if cls(place) != self.asked.place]
        elsewhere = [place for place in self.room if place != self.at]
        # Everything was visited without success: any place except the present one is right.
        places = likely or unseen or elsewhere or self.room
        kind = "search" if self.seen else "begin"
        return Due(kind, tuple(f"go to {place}" for place in places))

    def _due_at(self, wanted: str, kind: str, action: str) -> Due:
        """Return the action at a receptacle of the class, or the moves towards one."""
        places = self._places(wanted)
        if self.at in places:
            return Due(kind, (action.format(self.at),))
        return Due("bring", tuple(f"go to {place}" for place in places))

    def _places(self, wanted: str) -> list[str]:
        """Return the receptacles of the class.

        Once an object was placed in one of them, return only that one: a second object goes there
        too.
        """
        if self.home is not None and cls(self.home) == wanted:
            return [self.home]
        return [place for place in self.room if cls(place) == wanted]

    def _decide(self) -> Decision:
        right_actions = self.due()
        searches = right_actions.kind in SEARCHES
        return Decision(
            self.rng.choice(right_actions.actions) if searches else right_actions.actions[0]
        )

    # Parts of the thoughts

    def _hand(self) -> str:
        held = f"hold {self.held or 'nothing'}"
        return f"{held}, {len(self.placed)} home" if self.placed else held

    def _where(self) -> str:
        if self.held is not None and not self.asked.lamp:
            places = self._places(self._goal())
            return f"to {self.at if self.at in places else places[0]}"
        wanted = self.asked.object if self.held is None else self.asked.lamp
        candidates = self._copies(wanted)
        return f"{candidates[0][0]} in {candidates[0][1]}" if candidates else f"{wanted} unseen"

    def _goal(self) -> str:
        """Return the class of the receptacle that the held object goes to next."""
        tool = TOOL.get(self.asked.kind)
        return tool if tool and not self.treated else self.asked.place

    def _scan(self) -> str:
        """Return the receptacles in room order, up to the first that has to be visited."""
        parts = []
        for place in self.room:
            if place in self.seen:
                parts.append(f"{place} done")
            elif cls(place) == self.asked.place:
                parts.append(f"{place} goal")
            else:
                return ", ".join([*parts, f"{place} left"])
        return ", ".join(parts)

    def _copies(self, wanted: str) -> list[tuple[str, str]]:
        """Return (object, receptacle) for the seen objects of the class outside the target.

        The present place comes first, then room order. Within a receptacle the order is that of the
        engine's text: descending numbers.
        """
        order = sorted(self.seen, key=lambda place: (place != self.at, self.room.index(place)))
        return [
            (name, place)
            for place in order
            for name in sorted(self.seen[place], key=_number, reverse=True)
            if cls(name) == wanted and name not in self.placed and cls(place) != self.asked.place
        ]


def _number(name: str) -> int:
    return int(name.rsplit(" ", 1)[1])
