"""The installed ALFWorld engine with memoised slow parts. An engine runs many games, one at a time.

- Memoised: the parsed grammar, the translation of each game's PDDL problem, the initial facts, the
  action objects and the command text of each operator.
- Unchanged: the planner library that holds the state, the grammar rules and the object names.

The engine is not thread-safe: the translator redirects standard output and rewrites ``sys.argv``.
It must run in its own process.
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
from agent_system.environments.env_package.alfworld.planner import (
    Translation,
    load_planner,
    load_translation,
)

BANNER = "-= Welcome to TextWorld, ALFRED! =-\n\n"
MAX_CACHED_FACTS = 200_000  # facts cached over all games, about 0.5 kB each
# Each engine has its own copy of the planner library, which holds the state of its game. Copies
# are reused and never unloaded: loading a copy after unloading another crashes the process.
_idle_libraries: list[Any] = []


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """Output of the engine after ``reset`` or ``step``."""

    text: str
    commands: tuple[str, ...]  # admissible commands, sorted
    won: bool
    is_valid: bool  # the command was one of the admissible ones


class Engine:
    """Engine that runs one loaded game at a time. ``translations`` is the folder in which
    translated PDDL problems are cached.
    """

    def __init__(self, translations: Path) -> None:
        requested_infos = textworld.EnvInfos(won=True, admissible_commands=True)
        self._env: Any = MemoPddlEnv(requested_infos, translations)

    def load(self, game: dict[str, Any]) -> None:
        """Load a game from the content of a ``game.tw-pddl`` file."""
        self._env.load(game)

    def reset(self) -> EngineOutput:
        """Start the loaded game and return its first output."""
        return self._make_output(self._env.reset(), is_valid=True)

    def step(self, command: str) -> EngineOutput:
        """Run one command. The text is "Nothing happens." if the command is not admissible."""
        state, _, _ = self._env.step(command)
        return self._make_output(state, is_valid=self._env._last_action is not None)

    def _make_output(self, state: Any, is_valid: bool) -> EngineOutput:
        commands = tuple(state["admissible_commands"])
        return EngineOutput(strip_banner(state.feedback), commands, bool(state["won"]), is_valid)

    def list_facts(self, names: frozenset[str]) -> list[str]:
        """Return the current facts with a predicate in ``names``, sorted, with readable names."""
        # Facts name objects by symbols such as ``mug_bar__plus_01_dot_20``. Use the readable names.
        readable_names = self._env._names
        return sorted(
            " ".join(
                [fact.name, *(readable_names[variable.name].strip() for variable in fact.arguments)]
            )
            for fact in self._env._pddl_state.facts
            if fact.name in names
        )

    def close(self) -> None:
        """Release the planner library for the next engine of this process."""
        if self._env is not None:
            _idle_libraries.append(self._env.downward_lib)
            self._env = None


def strip_banner(text: str) -> str:
    """Return an engine text without the banner and surrounding blanks."""
    return text.removeprefix(BANNER).strip()


class MemoPddlEnv(PddlEnv):
    """``PddlEnv`` with ALFWorld's object names, and one translation and one parse per game."""

    def __init__(self, infos: textworld.EnvInfos, translations: Path) -> None:
        # Skip ``PddlEnv.__init__``, which always loads another library.
        textworld.Environment.__init__(self, infos)
        self._translations = translations
        self.downward_lib = _idle_libraries.pop() if _idle_libraries else load_planner()

    def load(self, filename_or_data: Any) -> None:
        if len(_memento_cache) > MAX_CACHED_FACTS:
            # TextWorld caches all facts of all games without a limit. Facts are compared by value,
            # so clearing the cache is safe.
            _memento_cache.clear()
        domain = filename_or_data["pddl_domain"]
        self._logic = MemoLogic(domain, filename_or_data["grammar"])
        self._translation = load_translation(
            domain, filename_or_data["pddl_problem"], self._translations
        )
        self._pddl_state = MemoState(self.downward_lib, self._translation, self._logic)
        self._entity_infos = self._get_entity_infos()
        names = Demangler(game_infos=self._entity_infos, shuffle=False)
        infos: dict[str, Any] = self._entity_infos
        for info in infos.values():
            info.name = names.demangle_alfred_name(info.id)
        self._names = {key: info.name for key, info in self._entity_infos.items()}
        self._commands: dict[int, str] = {}

    def reset(self):
        self._pddl_state = MemoState(self.downward_lib, self._translation, self._logic)
        self.prev_state = None
        self.state = textworld.GameState()
        self._last_action = None
        self._moves = 0
        self.state.feedback = self._logic.grammar.derive("#intro#", self._make_context({}))
        self._gather_infos()
        return self.state

    def _make_context(self, mapping: dict) -> dict[str, Any]:
        entities = self._entity_infos
        variables = {
            placeholder.name: entities[variable.name] for placeholder, variable in mapping.items()
        }
        return {
            "state": self._pddl_state,
            "variables": variables,
            "mapping": mapping,
            "entity_infos": entities,
        }

    def _gather_infos(self) -> None:
        actions = self._pddl_state.all_applicable_actions()
        commands = [
            self._commands.get(action.id) or self._make_command(action) for action in actions
        ]
        self.state["won"] = self._pddl_state.check_goal()
        # No ALFWorld game can be lost. The caller limits the number of turns.
        self.state["lost"] = False
        self.state["_valid_actions"] = actions
        self.state["_valid_commands"] = commands
        self.state["admissible_commands"] = sorted(set(commands))

    def _make_command(self, action) -> str:
        """Return the command text of an operator, cached per game: names never change."""
        template = self._logic.grammar.derive(
            self._logic.actions[action.name].template, self._make_context(action.mapping)
        )
        self._commands[action.id] = template.format(**self._names)
        return self._commands[action.id]


class MemoState(PddlState):
    """``PddlState`` made from a cached translation. ``replan`` is unavailable: no planner is
    loaded.
    """

    def __init__(self, downward_lib, translation: Translation, logic: MemoLogic) -> None:
        self._logic = logic
        self.downward_lib = downward_lib
        self.sas = translation.sas
        self.name2type = translation.types_of_things
        self._actions = translation.actions
        self._known_operators = translation.known_operators
        self._operators: dict[int, Any] = {}
        logic.types = translation.types
        # The library holds one state. Loading replaces it by the start of this game.
        downward_lib.load_sas(translation.sas.encode())
        if translation.start_state is None:
            translation.start_state = self._first_state(translation)
        self._restore_state(translation.start_state)

    def _first_state(self, translation: Translation) -> tuple:
        self._restore_state((defaultdict(set), {}, defaultdict(set), Counter()))
        self.add_facts(translation.static_facts)
        atoms = (Atom * self.downward_lib.get_state_size())()
        self.downward_lib.get_state(atoms)
        facts = [atom.get_fact(self.name2type) for atom in atoms]
        self.add_facts([fact for fact in facts if not fact.is_negation])
        return self._facts, self._vars_by_name, self._vars_by_type, self._var_counts

    def _restore_state(self, start: tuple) -> None:
        # Copy the four containers: the running state changes them in place.
        facts, by_name, by_type, counts = start
        self._facts = defaultdict(set, {key: value.copy() for key, value in facts.items()})
        self._vars_by_name = by_name.copy()
        self._vars_by_type = defaultdict(set, {key: value.copy() for key, value in by_type.items()})
        self._var_counts = counts.copy()

    def all_applicable_actions(self) -> list:
        """Return one action per distinct operator name, in the library's order."""
        count = self.downward_lib.get_applicable_operators_count()
        operators = (fast_downward.Operator * count)()
        self.downward_lib.get_applicable_operators(operators)
        # Stored for ``_read_operator``, which reads the names of new operators only.
        self._operators = {operator.id: operator for operator in operators}
        actions = []
        seen_names = set()
        for operator_id in self._operators:
            name, action = self._known_operators.get(operator_id) or self._read_operator(
                operator_id
            )
            # The planner grounds some actions into several operators of one name. They have one
            # command.
            if name not in seen_names:
                seen_names.add(name)
                actions.append(action)
        return actions

    def _read_operator(self, number: int) -> tuple[str, Any]:
        """Return label and action of an operator, cached: they do not depend on the state."""
        label = self._operators[number].name
        name, *arguments = label.split()
        action: Any = textworld.logic.Action(name=name, preconditions=[], postconditions=[])
        action.id = number
        action.mapping = {
            textworld.logic.Placeholder(parameter.strip("?"), var_type): textworld.logic.Variable(
                argument, var_type
            )
            for (parameter, var_type), argument in zip(self._actions[name], arguments, strict=False)
        }
        action.feedback_rule = self._logic.actions[name].feedback_rule
        self._known_operators[number] = (label, action)
        return self._known_operators[number]
