"""The installed ALFWorld engine with its slow parts memoised; one engine plays many games, one at a
time.

What is remembered: the parsed grammar, the translation of a PDDL problem (per game), the initial
facts, the action objects and the command each operator reads as. What is not touched: the planner
library that holds and changes the state, the grammar rules that make the text, and the naming of
objects. Not safe in threads (the translator redirects standard output and rewrites ``sys.argv``),
so engines live in processes.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fast_downward
import textworld
import textworld.logic
from alfworld.agents.utils.misc import Demangler
from mementos.core import _memento_cache
from textworld.envs import PddlEnv
from textworld.envs.pddl.logic import Atom, PddlState

from agent_system.environments.env_package.alfworld.grammar import MemoLogic
from agent_system.environments.env_package.alfworld.planner import load_planner
from agent_system.environments.env_package.alfworld.translation import (
    Translation,
    translation_of,
)

BANNER = "-= Welcome to TextWorld, ALFRED! =-\n\n"
FACTS = 200_000  # facts remembered over games, about 0.5 kB each


# Each engine has a copy of the planner library to itself, which holds the state of its game. Copies
# are used again and never unloaded: loading one after another was unloaded crashes the process.
_idle_libraries: list[Any] = []


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """What the engine says after ``reset`` or ``step``."""

    text: str
    commands: tuple[str, ...]  # admissible commands, sorted
    won: bool
    valid: bool  # the command was one of the admissible ones


class Engine:
    """Load a game, play it, load the next. What is translated is kept in ``translations``."""

    def __init__(self, translations: Path) -> None:
        asked = textworld.EnvInfos(won=True, admissible_commands=True)
        self._env: Any = MemoPddlEnv(asked, translations)

    def load(self, game: dict[str, Any]) -> None:
        """Take the content of a ``game.tw-pddl`` file."""
        self._env.load(game)

    def reset(self) -> EngineOutput:
        """Start the loaded game."""
        state = self._env.reset()
        return EngineOutput(
            tidy(state.feedback), tuple(state["admissible_commands"]), bool(state["won"]), True
        )

    def step(self, command: str) -> EngineOutput:
        """Play one command; an unknown one reads "Nothing happens."."""
        state, _, _ = self._env.step(command)
        valid = self._env.last_action is not None
        return EngineOutput(
            tidy(state.feedback), tuple(state["admissible_commands"]), bool(state["won"]), valid
        )

    def facts(self, names: frozenset[str]) -> list[str]:
        """The facts of the current state with one of these (lower-case) predicate names, readable
        and sorted.
        """
        # Engine texts call things by readable names, facts by symbols such as
        # ``mug_bar__plus_01_dot_20``.
        entities = self._env._entity_infos
        return sorted(
            " ".join(
                [fact.name, *(entities[variable.name].name.strip() for variable in fact.arguments)]
            )
            for fact in self._env._pddl_state.facts
            if fact.name in names
        )

    def close(self) -> None:
        """Hand the planner library back, for the next engine of this process."""
        if self._env is not None:
            _idle_libraries.append(self._env.downward_lib)
            self._env = None


def tidy(text: str) -> str:
    """Engine text without the banner and surrounding blanks."""
    return text.removeprefix(BANNER).strip()


class MemoPddlEnv(PddlEnv):
    """``PddlEnv`` under ALFWorld's names, with one translation and one parse per game."""

    def __init__(self, infos: textworld.EnvInfos, translations: Path) -> None:
        # Not PddlEnv's, which always loads another library.
        textworld.Environment.__init__(self, infos)
        self._translations = translations
        self.downward_lib = _idle_libraries.pop() if _idle_libraries else load_planner()

    def load(self, filename_or_data: Any) -> None:
        if len(_memento_cache) > FACTS:
            # TextWorld keeps every fact of every game; equality is by value, so it may go.
            _memento_cache.clear()
        self._game_data = filename_or_data
        self.walkthrough = filename_or_data.get("walkthrough")
        self._logic = MemoLogic(filename_or_data["pddl_domain"], filename_or_data["grammar"])
        self._translation = translation_of(
            filename_or_data["pddl_domain"], filename_or_data["pddl_problem"], self._translations
        )
        self._pddl_state = MemoState(self.downward_lib, self._translation, self._logic)
        self._entity_infos = self._get_entity_infos()
        names = Demangler(game_infos=self._entity_infos, shuffle=False)
        infos: dict[str, Any] = self._entity_infos
        for info in infos.values():
            info.name = names.demangle_alfred_name(info.id)
        self._names = {key: info.name for key, info in self._entity_infos.items()}
        self._commands: dict[int, str] = {}

    @property
    def last_action(self):
        """The action the last command stood for; ``None`` where nothing happened."""
        return self._last_action

    def reset(self):
        self._pddl_state = MemoState(self.downward_lib, self._translation, self._logic)
        self.prev_state = None
        self.state = textworld.GameState()
        self._last_action = None
        self._moves = 0
        self.state.feedback = self._logic.grammar.derive("#intro#", self._context({}))
        self._gather_infos()
        return self.state

    def _context(self, mapping: dict) -> dict[str, Any]:
        variables = {
            placeholder.name: self._entity_infos[found.name]
            for placeholder, found in mapping.items()
        }
        entities = self._entity_infos
        return {
            "state": self._pddl_state,
            "variables": variables,
            "mapping": mapping,
            "entity_infos": entities,
        }

    def _gather_infos(self) -> None:
        actions = self._pddl_state.all_applicable_actions()
        commands = [self._commands.get(action.id) or self._command(action) for action in actions]
        self.state["won"] = self._pddl_state.check_goal()
        # ALFWorld has no way to lose; the caller limits the number of steps.
        self.state["lost"] = False
        self.state["_valid_actions"] = actions
        self.state["_valid_commands"] = commands
        self.state["admissible_commands"] = sorted(set(commands))

    def _command(self, action) -> str:
        """The command an operator reads as: names and places of furniture never change, so once per
        game.
        """
        template = self._logic.grammar.derive(
            self._logic.actions[action.name].template, self._context(action.mapping)
        )
        self._commands[action.id] = template.format(**self._names)
        return self._commands[action.id]


class MemoState(PddlState):
    """``PddlState`` made from a remembered translation.

    The planner is not loaded, so ``replan`` is not available.
    """

    def __init__(self, downward_lib, translation: Translation, logic: MemoLogic) -> None:
        self._logic = logic
        self.downward_lib = downward_lib
        self.sas = translation.sas
        self.name2type = translation.types_of_things
        self._actions = translation.actions
        self._known = translation.known
        self._operators: dict[int, Any] = {}
        logic.types = translation.types
        # The library holds one state: loading starts the game again, whatever was played on it
        # before.
        downward_lib.load_sas(translation.sas.encode())
        if translation.start is None:
            translation.start = self._first_state(translation)
        self._restore(translation.start)

    def _first_state(self, translation: Translation) -> tuple:
        self._restore((defaultdict(set), {}, defaultdict(set), Counter()))
        self.add_facts(translation.static_facts)
        atoms = (Atom * self.downward_lib.get_state_size())()
        self.downward_lib.get_state(atoms)
        facts = [atom.get_fact(self.name2type) for atom in atoms]
        self.add_facts([fact for fact in facts if not fact.is_negation])
        return self._facts, self._vars_by_name, self._vars_by_type, self._var_counts

    def _restore(self, start: tuple) -> None:
        # Copies, for the state that is played changes all four in place.
        facts, by_name, by_type, counts = start
        self._facts = defaultdict(set, {key: value.copy() for key, value in facts.items()})
        self._vars_by_name = by_name.copy()
        self._vars_by_type = defaultdict(set, {key: value.copy() for key, value in by_type.items()})
        self._var_counts = counts.copy()

    def all_applicable_actions(self) -> list:
        """One action per distinct operator name, in the library's order."""
        count = self.downward_lib.get_applicable_operators_count()
        operators = (fast_downward.Operator * count)()
        self.downward_lib.get_applicable_operators(operators)
        # Kept, because the name of an operator is only read where it was not seen before.
        self._operators = {operator.id: operator for operator in operators}
        actions = []
        seen = set()
        for number in self._operators:
            name, action = self._known.get(number) or self._know(number)
            # The planner grounds some actions into several operators of one name: one command
            # stands for all of them.
            if name not in seen:
                seen.add(name)
                actions.append(action)
        return actions

    def _know(self, number: int) -> tuple[str, Any]:
        """Name and action of an operator: of the translated problem, not of the state."""
        label = self._operators[number].name
        name, *arguments = label.split()
        action: Any = textworld.logic.Action(name=name, preconditions=[], postconditions=[])
        action.id = number
        action.mapping = {
            textworld.logic.Placeholder(parameter.strip("?"), kind): textworld.logic.Variable(
                argument, kind
            )
            for (parameter, kind), argument in zip(self._actions[name], arguments, strict=False)
        }
        action.feedback_rule = self._logic.actions[name].feedback_rule
        self._known[number] = (label, action)
        return self._known[number]
