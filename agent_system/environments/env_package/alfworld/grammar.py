"""The engine's text generation without its repeated work.

TextWorld's context-sensitive grammar parses every template, query and expression again each time it
derives a text and deep-copies its symbols on the way. ``MemoGrammar`` parses each once, keeps
symbols immutable and carries the context beside them; the texts are the same
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

_TASK = re.compile(r'(?<="rhs": ")Your task is to: (?:[^"\\]|\\.)*(?=")')
_PLACEHOLDER = "Your task is to: ."

parse_symbols = functools.lru_cache(maxsize=4096)(
    functools.partial(textgen._parse_and_convert, rule_name="symbols")
)
parse_query = functools.lru_cache(maxsize=1024)(Rule.parse_conjunctive_query)
# What the expressions of ALFWorld's grammar are made of: ``r.name or r.id``, ``'a ' + o.name``.
_KNOWN = (
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


class UnsafeGame(ValueError):
    """The text of a game holds an expression that could do more than name things."""


@functools.lru_cache(maxsize=1024)
def _compiled(expression: str) -> Any:
    """The code of an expression of a game's file. Raises ``UnsafeGame`` for one that calls,
    imports or reaches below the surface of things.
    """
    tree = ast.parse(expression.strip(), filename="<grammar>", mode="eval")
    for node in ast.walk(tree):
        private = isinstance(node, ast.Attribute) and node.attr.startswith("_")
        if private or not isinstance(node, _KNOWN):
            raise UnsafeGame(
                f"a game's grammar holds the expression {expression[:80]!r}, which would run as "
                "code; allowed: names, their attributes, texts, + and or; fix: take the game from "
                "ALFWorld's own release"
            )
    return compile(tree, filename="<grammar>", mode="eval")


@functools.lru_cache(maxsize=16)
def _parse_document(text: str) -> tuple[dict, dict]:
    parsed: Any = pddl_logic._parse_and_convert(text, rule_name="pddlStart")
    actions, grammar = parsed
    return actions, dict(grammar._rules)


class MemoLogic(pddl_logic.GameLogic):
    """A game's logic whose parsed grammar is shared with every game that differs in the task
    sentence only.
    """

    def __init__(self, domain: str, grammar: str) -> None:
        # The sentence is cut out of the grammar before it is parsed, so that games that differ in
        # it alone share one entry of the cache.
        sentence = _TASK.search(grammar)
        self.domain = domain
        self.types = TypeHierarchy()
        actions, rules = _parse_document(_TASK.sub(_PLACEHOLDER, grammar) if sentence else grammar)
        self.actions = dict(actions)
        self.grammar = MemoGrammar()
        # Into rules of its own: the shared ones must not learn the sentence of this game.
        self.grammar._rules.update(rules)
        if sentence:
            # The sentence is JSON text inside the grammar, escapes included.
            text = json.loads(f'"{sentence.group()}"')
            self.grammar._rules["task"] = [textgen.ProductionRule("task", parse_symbols(text))]


class MemoGrammar(textgen.ContextSensitiveGrammar):
    """Derives texts from (symbol, context) pairs; a context is a dict of state, variables, mapping,
    entity_infos.
    """

    def derive(self, start: str, context: dict[str, Any] | None = None) -> str:
        """Expand ``start`` depth first; the text the parent class derives."""
        # A stack in place of recursion, filled in reverse: what is popped first stands first in the
        # text.
        stack = [(symbol, context or {}) for symbol in reversed(parse_symbols(start))]
        words = []
        while stack:
            symbol, here = stack.pop()
            if isinstance(symbol, textgen.TerminalSymbol):
                words.append(str(symbol))
            else:
                stack.extend(reversed(self._expand(symbol, here)))
        return "".join(words)

    def _expand(self, symbol, context: dict[str, Any]) -> list[tuple]:
        if isinstance(symbol, textgen.NonterminalSymbol):
            return [(part, context) for part in self._rule(symbol, context).rhs]
        if isinstance(symbol, textgen.EvalSymbol):
            # Expressions of the game's file: no text of a policy gets here.
            value = eval(_compiled(symbol.expression), {}, context["variables"])
            return [(textgen.TerminalSymbol(value), context)]
        if isinstance(symbol, textgen.ConditionalSymbol):
            contexts = matches(symbol.given, context) if symbol.given else [context]
            return [(symbol.expression, found) for found in contexts]
        if isinstance(symbol, textgen.ListSymbol):
            return enumerate_parts(self._expand(symbol.symbol, context), context)
        raise NotImplementedError(f"unknown grammar symbol {type(symbol).__name__}")

    def _rule(self, symbol, context: dict[str, Any]):
        rules = self._rules.get(str(symbol))
        if not rules:
            raise textgen.CSGUnknownSymbolError(symbol)
        for rule in rules:
            if not rule.condition or holds(rule.condition, context):
                return rule
        raise IndexError(f"no rule of #{symbol}# applies")


def holds(condition: str, context: dict[str, Any]) -> bool:
    """Whether ``condition`` has a match in the context's state."""
    return (
        next(
            iter(context["state"].all_assignments(parse_query(condition), context["mapping"])), None
        )
        is not None
    )


def matches(expression: str, context: dict[str, Any]) -> list[dict[str, Any]]:
    """One context per match of ``expression``, variables bound, in the engine's (sorted) order."""
    entities = context["entity_infos"]
    found = []
    for mapping in context["state"].all_assignments(parse_query(expression), context["mapping"]):
        named = {
            placeholder.name: entities[variable.name] for placeholder, variable in mapping.items()
        }
        variables = {**context["variables"], **named}
        bound = {**context["mapping"], **mapping}
        found.append({**context, "variables": variables, "mapping": bound})
    return found


def enumerate_parts(parts: list[tuple], context: dict[str, Any]) -> list[tuple]:
    """``a, b, and c`` as symbols: the separators are symbols of the game's grammar."""
    if not parts:
        return [(textgen.NonterminalSymbol("list_empty"), context)]
    listed = [parts[0]]
    for position, part in enumerate(parts[1:], start=2):
        separator = "list_last_separator" if position == len(parts) else "list_separator"
        listed += [(textgen.NonterminalSymbol(separator), context), part]
    return listed
