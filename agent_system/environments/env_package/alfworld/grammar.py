"""Memoised text generation of the engine.

TextWorld's context-sensitive grammar parses every template, query and expression again for each
text, and deep-copies its symbols. ``MemoGrammar`` parses each of them once. It does not store the
context in a symbol, so symbols need no copy. Both grammars generate equal texts
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
# Node types in the expressions of ALFWorld's grammar: ``r.name or r.id``, ``'a ' + o.name``.
_ALLOWED_NODES = (
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
    """Error for a game whose grammar contains an expression with syntax that is not allowed.

    Allowed are names, attributes, strings, ``+`` and ``or``.
    """


@functools.lru_cache(maxsize=1024)
def _compile_expression(expression: str) -> Any:
    """Compile an expression of a game's file. Raises ``UnsafeGame`` for forbidden syntax."""
    tree = ast.parse(expression.strip(), filename="<grammar>", mode="eval")
    for node in ast.walk(tree):
        is_private = isinstance(node, ast.Attribute) and node.attr.startswith("_")
        if is_private or not isinstance(node, _ALLOWED_NODES):
            raise UnsafeGame(
                f"the grammar of a game contains the expression {expression[:80]!r}, which would "
                "run as code; allowed: names, their attributes, texts, + and or; fix: use the game "
                "file of ALFWorld's release"
            )
    return compile(tree, filename="<grammar>", mode="eval")


@functools.lru_cache(maxsize=16)
def _parse_document(text: str) -> tuple[dict, dict]:
    parsed: Any = pddl_logic._parse_and_convert(text, rule_name="pddlStart")
    actions, grammar = parsed
    return actions, dict(grammar._rules)


class MemoLogic(pddl_logic.GameLogic):
    """Logic of a game. Games that differ only in the task sentence share one parsed grammar."""

    def __init__(self, domain: str, grammar: str) -> None:
        # Remove the sentence before parsing: the rest of the grammar is the key of the cache.
        sentence = _TASK.search(grammar)
        self.domain = domain
        self.types = TypeHierarchy()
        actions, rules = _parse_document(_TASK.sub(_PLACEHOLDER, grammar) if sentence else grammar)
        self.actions = dict(actions)
        self.grammar = MemoGrammar()
        # Copy the shared rules: the sentence of this game is added below.
        self.grammar._rules.update(rules)
        if sentence:
            # The grammar file is JSON, so the task sentence in it contains JSON escapes.
            text = json.loads(f'"{sentence.group()}"')
            self.grammar._rules["task"] = [textgen.ProductionRule("task", parse_symbols(text))]


class MemoGrammar(textgen.ContextSensitiveGrammar):
    """Grammar that derives texts from (symbol, context) pairs.

    A context is a dict with the keys ``state``, ``variables``, ``mapping`` and ``entity_infos``.
    """

    def derive(self, start: str, context: dict[str, Any] | None = None) -> str:
        """Expand ``start`` depth first and return the text, equal to that of the parent class."""
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
            value = eval(_compile_expression(symbol.expression), {}, context["variables"])
            return [(textgen.TerminalSymbol(value), context)]
        if isinstance(symbol, textgen.ConditionalSymbol):
            contexts = bind_matches(symbol.given, context) if symbol.given else [context]
            return [(symbol.expression, match_context) for match_context in contexts]
        if isinstance(symbol, textgen.ListSymbol):
            return enumerate_parts(self._expand_symbol(symbol.symbol, context), context)
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


def bind_matches(expression: str, context: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one context per assignment of objects that makes ``expression`` true.

    Each contains its assignment of the variables. The order is the engine's (sorted).
    """
    entities = context["entity_infos"]
    contexts = []
    for mapping in context["state"].all_assignments(parse_query(expression), context["mapping"]):
        entity_by_placeholder = {
            placeholder.name: entities[variable.name] for placeholder, variable in mapping.items()
        }
        variables = {**context["variables"], **entity_by_placeholder}
        bound = {**context["mapping"], **mapping}
        contexts.append({**context, "variables": variables, "mapping": bound})
    return contexts


def enumerate_parts(parts: list[tuple], context: dict[str, Any]) -> list[tuple]:
    """Return ``parts`` with the grammar's separator symbols between them: ``a, b, and c``."""
    if not parts:
        return [(textgen.NonterminalSymbol("list_empty"), context)]
    separated_parts = [parts[0]]
    for position, part in enumerate(parts[1:], start=2):
        separator = "list_last_separator" if position == len(parts) else "list_separator"
        separated_parts += [(textgen.NonterminalSymbol(separator), context), part]
    return separated_parts
