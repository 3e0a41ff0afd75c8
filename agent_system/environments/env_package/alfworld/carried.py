"""Thoughts that work out what the action needs, and an expert that has them.

With ``env.history=window`` a prompt shows what was read so far, in order and unsorted, and no
earlier thought. Level 1 thinks nothing; level 2 says what is in the hand, level 3 where the thing
looked for was seen, level 4 goes through the room until a place is left that was not looked into:
``hold nothing. mug unseen. cabinet 2 done, desk 1 goal, shelf 1 left.``. No thought says an action.

Every level writes its parts whatever the state is. Which of them the action needs depends on the
state, whose kind and level the reader names.
"""

from dataclasses import dataclass, replace

from agent_system.environments.env_package.alfworld.expert import (
    TOOL,
    AlfworldPlayer,
    cls,
)
from agent_system.environments.expert_protocol import Decision, Thought
from rlvcr.levels import LEVELS

# What kind of action is due, and the lowest level whose thought holds all that it needs.
NEEDED = {
    "open": 1,  # what is closed before one's eyes
    "look": 1,  # at the place where one stands
    "take": 1,  # what lies before one's eyes
    "begin": 1,  # no place was looked into: any will do
    "put": 2,  # what is in the hand
    "use": 2,
    "bring": 3,  # what is in the hand to where it is wanted
    "return": 3,  # to what was seen elsewhere
    "search": 4,  # in places not yet looked into
}
SEARCHES = {"begin", "search"}


@dataclass(frozen=True, slots=True)
class Due:
    """What kind of action is due, and all right actions of it, in the order of the room."""

    kind: str
    actions: tuple[str, ...]


class CarriedPlayer(AlfworldPlayer):
    """Plays one episode. It searches by chance, but on level 4 where its thought arrives."""

    def act(self) -> Decision:
        """The next action, with the thought of each level."""
        due = self.due()
        decision = super().act()
        parts = (self._hand(), self._where(), self._scan())
        thoughts = {
            level: Thought(" ".join(f"{part}." for part in parts[: level - 1]), decision.action)
            for level in LEVELS
        }
        # Only who goes through the room knows which of the places comes first.
        if due.kind in SEARCHES and not decision.slack and not decision.slip:
            thoughts[4] = replace(thoughts[4], action=due.actions[0])
        needed = NEEDED[due.kind]
        return replace(decision, thoughts=thoughts, needed_level=needed, right=due.actions)

    def due(self) -> Due:
        """What is due in the present state; the same for everyone who has read the same."""
        at = self.at
        if at in self.closed:
            return Due("open", (f"open {at}",))
        if at is not None and at not in self.seen:
            return Due("look", (f"examine {at}",))
        if self.held is None:
            return self._due_of_search(self.asked.object, "take {} from {}")
        if cls(self.held) != self.asked.object:
            return Due("put", (f"move {self.held} to {at}",))
        tool = TOOL.get(self.asked.kind)
        if tool and not self.treated:
            return self._due_at(tool, "use", f"{self.asked.kind} {self.held} with {{}}")
        if self.asked.lamp:
            return self._due_of_search(self.asked.lamp, "use {}")
        return self._due_at(self.asked.place, "put", f"move {self.held} to {{}}")

    def _due_of_search(self, wanted: str, use: str) -> Due:
        """To use what is ``wanted``: where it is seen, else where it was seen, else search."""
        found = self._copies(wanted)
        here = [name for name, place in found if place == self.at]
        if here:
            kind = "take" if self.held is None else "use"
            return Due(kind, tuple(use.format(name, self.at) for name in here))
        if found:
            return Due("return", tuple(dict.fromkeys(f"go to {place}" for _, place in found)))
        unseen = [place for place in self.room if place not in self.seen]
        likely = [place for place in unseen if cls(place) != self.asked.place]
        elsewhere = [place for place in self.room if place != self.at]
        # All but the place at hand, where everything was looked into: something was overlooked.
        places = likely or unseen or elsewhere or self.room
        kind = "search" if self.seen else "begin"
        return Due(kind, tuple(f"go to {place}" for place in places))

    def _due_at(self, wanted: str, kind: str, action: str) -> Due:
        """What is due at a receptacle of the class, or the way there."""
        places = self._places(wanted)
        if self.at in places:
            return Due(kind, (action.format(self.at),))
        return Due("bring", tuple(f"go to {place}" for place in places))

    def _places(self, wanted: str) -> list[str]:
        """Receptacles of the class; of two objects the second goes where the first one is."""
        if self.home is not None and cls(self.home) == wanted:
            return [self.home]
        return [place for place in self.room if cls(place) == wanted]

    def _decide(self) -> Decision:
        due = self.due()
        searches = due.kind in SEARCHES
        return Decision(self.rng.choice(due.actions) if searches else due.actions[0])

    # What is thought

    def _hand(self) -> str:
        held = f"hold {self.held or 'nothing'}"
        return f"{held}, {len(self.placed)} home" if self.placed else held

    def _where(self) -> str:
        if self.held is not None and not self.asked.lamp:
            places = self._places(self._goal())
            return f"to {self.at if self.at in places else places[0]}"
        wanted = self.asked.object if self.held is None else self.asked.lamp
        found = self._copies(wanted)
        return f"{found[0][0]} in {found[0][1]}" if found else f"{wanted} unseen"

    def _goal(self) -> str:
        """The class of the place that what is held is to be brought to next."""
        tool = TOOL.get(self.asked.kind)
        return tool if tool and not self.treated else self.asked.place

    def _scan(self) -> str:
        """Place after place, up to the first that is left to look into."""
        said = []
        for place in self.room:
            if place in self.seen:
                said.append(f"{place} done")
            elif cls(place) == self.asked.place:
                said.append(f"{place} goal")
            else:
                return ", ".join([*said, f"{place} left"])
        return ", ".join(said)

    def _copies(self, wanted: str) -> list[tuple[str, str]]:
        """Objects of the class seen where they are not wanted, with their places: first those at
        hand, the others in the order of the room; in a place as the engine lists them.
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
