"""Text generation of the ALFWorld engine, with caches.

TextWorld's context-sensitive grammar parses every template, query and expression again for each
text, and deep-copies its symbols. ``CachedTextGrammar`` parses each of them once. It does not store
the context in a symbol, so symbols need no copy. The texts equal those of TextWorld
(``tests/unit/agent_system/environments/env_package/test_alfworld_engine.py`` compares them).
"""

import ast
import functools
import json
import re
from typing import Any

from textworld.envs.pddl import logic as pddl_logic
from textworld.envs.pddl import textgen
from textworld.logic import Rule, TypeHierarchy

_TASK_SENTENCE_PATTERN = re.compile(r'(?<="rhs": ")Your task is to: (?:[^"\\]|\\.)*(?=")')
_EMPTY_TASK_SENTENCE = "Your task is to: ."

parse_symbols = functools.lru_cache(maxsize=4096)(
    functools.partial(textgen._parse_and_convert, rule_name="symbols")
)
parse_query = functools.lru_cache(maxsize=1024)(Rule.parse_conjunctive_query)
# Node types in the expressions of ALFWorld's grammar: ``r.name or r.id``, ``'a ' + o.name``.
_ALLOWED_NODE_TYPES = (
    ast.Expression,
    ast.Name,
    ast.Attribute,
    ast.Constant,
    ast.BinOp,
    ast.Add,
    ast.BoolOp,
    ast.Or,
    ast.Load,
)


class UnsafeGameError(ValueError):
    """Error: the grammar of a game contains an expression that would run as code."""


@functools.lru_cache(maxsize=1024)
def _compile_expression(expression: str) -> Any:
    """Compile an expression of a game's file. Raises ``UnsafeGameError`` for forbidden syntax."""
    tree = ast.parse(expression.strip(), filename="<grammar>", mode="eval")
    for node in ast.walk(tree):
        is_private_attribute = isinstance(node, ast.Attribute) and node.attr.startswith("_")
        if is_private_attribute or not isinstance(node, _ALLOWED_NODE_TYPES):
            raise UnsafeGameError(
                f"the grammar of a game contains the expression {expression[:80]!r}, which would "
                "run as code; allowed: names, their attributes, texts, + and or; fix: use the game "
                "file of ALFWorld's release"
            )
    return compile(tree, filename="<grammar>", mode="eval")


@functools.lru_cache(maxsize=16)
def _parse_grammar_file(text: str) -> tuple[dict, dict]:
    actions_and_grammar: Any = pddl_logic._parse_and_convert(text, rule_name="pddlStart")
    actions, grammar = actions_and_grammar
    return actions, dict(grammar._rules)


class CachedGameLogic(pddl_logic.GameLogic):
    """Actions and text grammar of a game. Games share everything except the task sentence."""

    def __init__(self, domain: str, grammar: str) -> None:
        # Remove the task sentence before parsing. Games then share one cached grammar.
        sentence_match = _TASK_SENTENCE_PATTERN.search(grammar)
        self.domain = domain
        self.types = TypeHierarchy()
        actions, rules = _parse_grammar_file(
            _TASK_SENTENCE_PATTERN.sub(_EMPTY_TASK_SENTENCE, grammar) if sentence_match else grammar
        )
        self.actions = dict(actions)
        self.grammar = CachedTextGrammar()
        # Copy the rules, which other games share, because the sentence of this game is added.
        self.grammar._rules.update(rules)
        if sentence_match:
            # The grammar file is JSON, so the task sentence in it contains JSON escapes.
            sentence = json.loads(f'"{sentence_match.group()}"')
            self.grammar._rules["task"] = [textgen.ProductionRule("task", parse_symbols(sentence))]


class CachedTextGrammar(textgen.ContextSensitiveGrammar):
    """Grammar that expands symbols to the texts of a game, each symbol in a context.

    A context is a dict with the game's ``state``, the ``variables`` of expressions, the ``mapping``
    of placeholders to objects, and ``entity_infos`` (information about the objects).
    """

    def derive(self, start: str, context: dict[str, Any] | None = None) -> str:
        """Expand the grammar symbols in ``start`` and return the text.

        The text equals that of TextWorld's own grammar.
        """
        # A stack replaces recursion. Symbols are pushed in reverse, so they are popped in order.
        stack = [(symbol, context or {}) for symbol in reversed(parse_symbols(start))]
        terminal_texts = []
        while stack:
            symbol, symbol_context = stack.pop()
            if isinstance(symbol, textgen.TerminalSymbol):
                terminal_texts.append(str(symbol))
            else:
                stack.extend(reversed(self._expand_symbol(symbol, symbol_context)))
        return "".join(terminal_texts)

    def _expand_symbol(self, symbol, context: dict[str, Any]) -> list[tuple]:
        if isinstance(symbol, textgen.NonterminalSymbol):
            return [(rhs_symbol, context) for rhs_symbol in self._choose_rule(symbol, context).rhs]
        if isinstance(symbol, textgen.EvalSymbol):
            # The expression comes from the game's file, never from a policy.
            expression_value = eval(
                _compile_expression(symbol.expression), {}, context["variables"]
            )
            return [(textgen.TerminalSymbol(expression_value), context)]
        if isinstance(symbol, textgen.ConditionalSymbol):
            contexts = bind_variables(symbol.given, context) if symbol.given else [context]
            return [(symbol.expression, match_context) for match_context in contexts]
        if isinstance(symbol, textgen.ListSymbol):
            return insert_separators(self._expand_symbol(symbol.symbol, context), context)
        raise NotImplementedError(f"unknown grammar symbol {type(symbol).__name__}")

    def _choose_rule(self, symbol, context: dict[str, Any]):
        rules = self._rules.get(str(symbol))
        if not rules:
            raise textgen.CSGUnknownSymbolError(symbol)
        for rule in rules:
            if not rule.condition:
                return rule
            query = parse_query(rule.condition)
            assignments = context["state"].all_assignments(query, context["mapping"])
            # Stop at the first assignment of objects that makes the condition true.
            if any(True for _ in assignments):
                return rule
        raise IndexError(f"no rule of #{symbol}# applies")


def bind_variables(expression: str, context: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one context per assignment of objects to variables that makes ``expression`` true.

    Each returned context is ``context`` with the values of one assignment. The order is that of the
    engine.
    """
    entities = context["entity_infos"]
    contexts = []
    for mapping in context["state"].all_assignments(parse_query(expression), context["mapping"]):
        entity_by_placeholder = {
            placeholder.name: entities[variable.name] for placeholder, variable in mapping.items()
        }
        variables = {**context["variables"], **entity_by_placeholder}
        combined_mapping = {**context["mapping"], **mapping}
        contexts.append({**context, "variables": variables, "mapping": combined_mapping})
    return contexts


def insert_separators(items: list[tuple], context: dict[str, Any]) -> list[tuple]:
    """Insert the grammar's separator symbols between ``items``, for a text like ``a, b, and c``."""
    if not items:
        return [(textgen.NonterminalSymbol("list_empty"), context)]
    separated_items = [items[0]]
    for item_number, item in enumerate(items[1:], start=2):
        separator = "list_last_separator" if item_number == len(items) else "list_separator"
        separated_items += [(textgen.NonterminalSymbol(separator), context), item]
    return separated_items
