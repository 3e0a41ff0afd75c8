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

from agent_system.environments.env_package.alfworld.grammar import CachedGameLogic
from agent_system.environments.env_package.alfworld.planner import (
    PddlTranslation,
    load_pddl_translation,
    load_planner,
)

BANNER = "-= Welcome to TextWorld, ALFRED! =-\n\n"
MAX_CACHED_FACTS = 200_000  # facts cached over all games, about 0.5 kB each
# Each engine has its own copy of the planner library, which holds the state of its game. Copies
# are reused and never unloaded: loading a copy after unloading another crashes the process.
_unused_libraries: list[Any] = []


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """Output of the engine after ``reset`` or ``step``."""

    text: str
    admissible_commands: tuple[str, ...]  # sorted
    won: bool  # the task is solved
    is_valid: bool  # the command was one of the admissible ones


class Engine:
    """Engine that runs one loaded game at a time.

    ``translations_folder`` caches the translated PDDL problems on disk.
    """

    def __init__(self, translations_folder: Path) -> None:
        requested_infos = textworld.EnvInfos(won=True, admissible_commands=True)
        self._env: Any = CachedPddlEnv(requested_infos, translations_folder)

    def load(self, game: dict[str, Any]) -> None:
        """Load a game: the content of a ``game.tw-pddl`` file."""
        self._env.load(game)

    def reset(self) -> EngineOutput:
        return self._make_output(self._env.reset(), is_valid=True)

    def step(self, command: str) -> EngineOutput:
        """Run one command. The text is "Nothing happens." if the command is not admissible."""
        state, _, _ = self._env.step(command)
        return self._make_output(state, is_valid=self._env._last_action is not None)

    def _make_output(self, state: Any, is_valid: bool) -> EngineOutput:
        admissible_commands = tuple(state["admissible_commands"])
        return EngineOutput(
            strip_banner(state.feedback), admissible_commands, bool(state["won"]), is_valid
        )

    def list_facts(self, predicates: frozenset[str]) -> list[str]:
        """Return the current facts of ``predicates``, sorted, such as ``opened drawer 1``."""
        # Facts name objects by symbols such as ``mug_bar__plus_01_dot_20``. Use the readable names.
        readable_names = self._env._readable_names
        return sorted(
            " ".join(
                [fact.name, *(readable_names[variable.name].strip() for variable in fact.arguments)]
            )
            for fact in self._env._pddl_state.facts
            if fact.name in predicates
        )

    def close(self) -> None:
        """Release the planner library for the next engine of this process."""
        if self._env is not None:
            _unused_libraries.append(self._env.downward_lib)
            self._env = None


def strip_banner(text: str) -> str:
    """Return an engine text without the line "Welcome to TextWorld" and outer white space."""
    return text.removeprefix(BANNER).strip()


class CachedPddlEnv(PddlEnv):
    """TextWorld's ``PddlEnv`` with caches, and with object names such as ``drawer 1``."""

    def __init__(self, infos: textworld.EnvInfos, translations_folder: Path) -> None:
        # Skip ``PddlEnv.__init__``, which always loads another library.
        textworld.Environment.__init__(self, infos)
        self._translations_folder = translations_folder
        self.downward_lib = _unused_libraries.pop() if _unused_libraries else load_planner()

    def load(self, filename_or_data: Any) -> None:
        if len(_memento_cache) > MAX_CACHED_FACTS:
            # TextWorld caches all facts of all games without a limit. Facts are compared by value,
            # so clearing the cache is safe.
            _memento_cache.clear()
        domain = filename_or_data["pddl_domain"]
        self._logic = CachedGameLogic(domain, filename_or_data["grammar"])
        self._translation = load_pddl_translation(
            domain, filename_or_data["pddl_problem"], self._translations_folder
        )
        self._pddl_state = CachedPddlState(self.downward_lib, self._translation, self._logic)
        self._entity_infos = self._get_entity_infos()
        name_converter = Demangler(game_infos=self._entity_infos, shuffle=False)
        entity_infos: dict[str, Any] = self._entity_infos
        for entity_info in entity_infos.values():
            entity_info.name = name_converter.demangle_alfred_name(entity_info.id)
        self._readable_names = {
            key: entity_info.name for key, entity_info in self._entity_infos.items()
        }
        self._command_by_operator_id: dict[int, str] = {}

    def reset(self):
        self._pddl_state = CachedPddlState(self.downward_lib, self._translation, self._logic)
        self.prev_state = None
        self.state = textworld.GameState()
        self._last_action = None
        self._moves = 0
        self.state.feedback = self._logic.grammar.derive("#intro#", self._make_grammar_context({}))
        self._gather_infos()
        return self.state

    def _make_grammar_context(self, mapping: dict) -> dict[str, Any]:
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
        admissible_commands = [
            self._command_by_operator_id.get(action.id) or self._make_command(action)
            for action in actions
        ]
        self.state["won"] = self._pddl_state.check_goal()
        # No ALFWorld game can be lost. The caller limits the number of turns.
        self.state["lost"] = False
        self.state["_valid_actions"] = actions
        self.state["_valid_commands"] = admissible_commands
        self.state["admissible_commands"] = sorted(set(admissible_commands))

    def _make_command(self, action) -> str:
        template = self._logic.grammar.derive(
            self._logic.actions[action.name].template, self._make_grammar_context(action.mapping)
        )
        self._command_by_operator_id[action.id] = template.format(**self._readable_names)
        return self._command_by_operator_id[action.id]


class CachedPddlState(PddlState):
    """TextWorld's ``PddlState`` (state of a game), made from a cached translation of the problem.

    The planner library only tracks the state and never plans, so ``replan`` is unavailable.
    """

    def __init__(self, downward_lib, translation: PddlTranslation, logic: CachedGameLogic) -> None:
        self._logic = logic
        self.downward_lib = downward_lib
        self.sas = translation.sas
        self.name2type = translation.object_types
        self._actions = translation.actions
        self._operator_cache = translation.operator_cache
        self._operators: dict[int, Any] = {}
        logic.types = translation.types
        # The library holds one state. Loading replaces it by the start state of this game.
        downward_lib.load_sas(translation.sas.encode())
        if translation.start_state is None:
            translation.start_state = self._compute_start_state(translation)
        self._restore_state(translation.start_state)

    def _compute_start_state(self, translation: PddlTranslation) -> tuple:
        self._restore_state((defaultdict(set), {}, defaultdict(set), Counter()))
        self.add_facts(translation.static_facts)
        atoms = (Atom * self.downward_lib.get_state_size())()
        self.downward_lib.get_state(atoms)
        facts = [atom.get_fact(self.name2type) for atom in atoms]
        self.add_facts([fact for fact in facts if not fact.is_negation])
        return self._facts, self._vars_by_name, self._vars_by_type, self._var_counts

    def _restore_state(self, start_state: tuple) -> None:
        # Copy the containers, because the running state changes them in place.
        facts, variables_by_name, variables_by_type, variable_counts = start_state
        self._facts = defaultdict(set, {key: value.copy() for key, value in facts.items()})
        self._vars_by_name = variables_by_name.copy()
        self._vars_by_type = defaultdict(
            set, {key: value.copy() for key, value in variables_by_type.items()}
        )
        self._var_counts = variable_counts.copy()

    def all_applicable_actions(self) -> list:
        """Return the actions that are possible in this state, in the planner library's order."""
        operator_count = self.downward_lib.get_applicable_operators_count()
        operators = (fast_downward.Operator * operator_count)()
        self.downward_lib.get_applicable_operators(operators)
        self._operators = {operator.id: operator for operator in operators}
        actions = []
        seen_names = set()
        for operator_id in self._operators:
            name, action = self._operator_cache.get(operator_id) or self._read_operator(operator_id)
            # The planner grounds some actions into several operators with the same name and the
            # same command. Return only the first one.
            if name not in seen_names:
                seen_names.add(name)
                actions.append(action)
        return actions

    def _read_operator(self, operator_id: int) -> tuple[str, Any]:
        """Return name and action of an operator.

        Both are cached, because they do not depend on the state.
        """
        operator_text = self._operators[operator_id].name
        name, *arguments = operator_text.split()
        action: Any = textworld.logic.Action(name=name, preconditions=[], postconditions=[])
        action.id = operator_id
        action.mapping = {
            textworld.logic.Placeholder(parameter.strip("?"), var_type): textworld.logic.Variable(
                argument, var_type
            )
            for (parameter, var_type), argument in zip(self._actions[name], arguments, strict=False)
        }
        action.feedback_rule = self._logic.actions[name].feedback_rule
        self._operator_cache[operator_id] = (operator_text, action)
        return self._operator_cache[operator_id]
