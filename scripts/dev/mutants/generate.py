"""Mutants of one module: mutmut's changes of its syntax tree, except changes of texts."""

import hashlib
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import islice
from pathlib import Path

import libcst as cst
from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider
from mutmut.mutation.file_mutation import MutationVisitor
from mutmut.mutation.mutators import mutation_operators, operator_string
from mutmut.mutation.pragma_handling import IgnoredCode

# Functions whose arguments are texts for people, or names without effect (type variables).
TEXT_FUNCTIONS = {"TypeVar", "NewType", "ParamSpec", "getLogger", "warn", "cast"}
LOGGER_NAMES = {"logger", "log", "logging"}
# Arguments whose change no test can notice: `strict` of zip only detects unequal lengths, and
# `device` and `non_blocking` have no effect without an accelerator.
IGNORED_ARGUMENTS = {"strict", "device", "non_blocking"}
COMPREHENSION_NAMES = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}


@dataclass(frozen=True)
class Mutant:
    """Source text of a module with one changed expression."""

    module: str
    function: str
    lines: tuple[int, int]  # first and last line of the changed statement in the original
    before: str  # original code of the changed lines
    after: str  # changed code
    context: str  # text of the outermost function with the change
    source: str  # text of the whole changed module
    at_import: bool = False  # the statement runs when the module is imported

    @property
    def stable_key(self) -> str:
        """Hash of module, function, change and function text. Line numbers do not change it."""
        text = "\0".join((self.module, self.function, self.before, self.after, self.context))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def make_mutants(path: Path, root: Path) -> list[Mutant]:
    """Return the mutants of the module at ``path``, without those that change no compiled code."""
    source = path.read_text()
    module = path.relative_to(root).as_posix()
    original_code = compile(source, str(path), "exec")
    seen_fingerprints: set[object] = set()
    mutants: list[Mutant] = []
    counts_by_key: dict[str, int] = {}
    for mutant in _iter_mutants(source, module):
        try:
            changed_functions = find_changed_code(
                original_code, compile(mutant.source, str(path), "exec")
            )
        except SyntaxError:
            continue
        fingerprint = tuple(
            (old_code.co_qualname, _describe_code_tree(new_code))
            for old_code, new_code in changed_functions
        )
        if not changed_functions or fingerprint in seen_fingerprints:
            continue
        seen_fingerprints.add(fingerprint)
        # If a function has equal lines with the same change, a count distinguishes the mutants.
        num_equal_keys = counts_by_key[mutant.stable_key] = (
            counts_by_key.get(mutant.stable_key, 0) + 1
        )
        function = f"{mutant.function}#{num_equal_keys}" if num_equal_keys > 1 else mutant.function
        at_import = any(
            not is_function_code(original_function) for original_function, _ in changed_functions
        )
        mutants.append(replace(mutant, function=function, at_import=at_import))
    return mutants


def find_changed_code(
    old: types.CodeType, new: types.CodeType
) -> list[tuple[types.CodeType, types.CodeType]]:
    """Return pairs (old, new) of the outermost functions whose code, or inner code, differs.

    If code that runs at import differs, the only pair is that of the module.
    """
    if _describe_code(old) != _describe_code(new):
        return [(old, new)]
    changed_pairs = []
    for inner_old_code, inner_new_code in zip(
        list_inner_code(old), list_inner_code(new), strict=True
    ):
        if is_function_code(inner_old_code):
            if _describe_code_tree(inner_old_code) != _describe_code_tree(inner_new_code):
                changed_pairs.append((inner_old_code, inner_new_code))
            continue
        nested_changes = find_changed_code(inner_old_code, inner_new_code)
        if any(not is_function_code(code) for code, _ in nested_changes):
            return [(old, new)]  # a class body runs only when its module is imported
        changed_pairs += nested_changes
    return changed_pairs


def list_inner_code(code: types.CodeType) -> list[types.CodeType]:
    """Return the code objects directly inside ``code``."""
    return [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]


def is_function_code(code: types.CodeType) -> bool:
    """Return False for a module, a class body and a comprehension, which can run at import."""
    optimized_flag = 0x1
    return bool(code.co_flags & optimized_flag) and code.co_name not in COMPREHENSION_NAMES


def _describe_code(code: types.CodeType) -> tuple[object, ...]:
    """Return a comparable value of ``code``, without line numbers and inner code objects."""
    constants = [
        "code" if isinstance(constant, types.CodeType) else (type(constant), repr(constant))
        for constant in code.co_consts
    ]
    variables = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    arguments = (code.co_argcount, code.co_kwonlyargcount, code.co_flags)
    return (code.co_code, tuple(constants), variables, arguments)


def _describe_code_tree(code: types.CodeType) -> tuple[object, ...]:
    return (
        _describe_code(code),
        tuple(_describe_code_tree(inner_code) for inner_code in list_inner_code(code)),
    )


class _CodeMutationVisitor(MutationVisitor):
    """Visitor of mutmut that also enters decorated functions and skips texts."""

    METADATA_DEPENDENCIES = (*MutationVisitor.METADATA_DEPENDENCIES, ParentNodeProvider)

    def _skip_node_and_children(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.FunctionDef):
            return False  # the base class would skip all decorated functions
        if isinstance(node, cst.Raise | cst.Import | cst.ImportFrom | cst.Assert):
            return True
        if isinstance(node, cst.Call) and _is_message_call(node.func):
            return True
        if isinstance(node, cst.Assign) and _is_device_node(node.value):
            return True
        if isinstance(node, cst.Arg) and node.keyword and node.keyword.value in IGNORED_ARGUMENTS:
            return True
        if isinstance(node, cst.If) and _get_name(node.test) == "TYPE_CHECKING":
            return True
        if isinstance(node, cst.BaseString) and _is_prose_string(node):
            return True
        return super()._skip_node_and_children(node)


def _is_message_call(function: cst.BaseExpression) -> bool:
    if isinstance(function, cst.Attribute):
        owner = _get_name(function.value)
        return owner in LOGGER_NAMES or function.attr.value in TEXT_FUNCTIONS
    return _get_name(function) in TEXT_FUNCTIONS


def _get_name(node: cst.CSTNode) -> str:
    return node.value if isinstance(node, cst.Name) else ""


def _is_prose_string(node: cst.BaseString) -> bool:
    """Return True for docstrings, strings with a space, and joined adjacent literals."""
    if isinstance(node, cst.SimpleString):
        return node.value.startswith(('"""', "'''")) or " " in node.value.strip("\"'").strip()
    return isinstance(node, cst.ConcatenatedString)


def _changes_only_text(before: cst.CSTNode, after: cst.CSTNode) -> bool:
    """Return True if only a text for people or an argument in ``IGNORED_ARGUMENTS`` changes."""
    if isinstance(before, cst.Assign | cst.AnnAssign) and isinstance(before.value, cst.Call):
        return _is_message_call(before.value.func)
    if isinstance(before, cst.Assign | cst.AnnAssign) and isinstance(before.value, cst.BaseString):
        return _is_prose_string(before.value)
    if not (isinstance(before, cst.Call) and isinstance(after, cst.Call)):
        return False
    if _is_device_node(before.args[0].value):
        return True
    remaining_argument_ids = {id(argument) for argument in after.args}
    removed_arguments = [
        argument for argument in before.args if id(argument) not in remaining_argument_ids
    ]
    return any(_is_message_argument(argument) for argument in removed_arguments)


def _is_device_node(node: cst.BaseExpression) -> bool:
    """Return True if ``node`` is ``device`` or ``x.device``, whose change no CPU test notices."""
    attribute = node.attr.value if isinstance(node, cst.Attribute) else _get_name(node)
    return attribute == "device"


def _is_message_argument(argument: cst.Arg) -> bool:
    if argument.keyword and argument.keyword.value in IGNORED_ARGUMENTS:
        return True
    value = argument.value
    return isinstance(value, cst.FormattedString) or (
        isinstance(value, cst.BaseString) and _is_prose_string(value)
    )


def _mutate_string_once(node: cst.BaseString) -> Iterator[cst.BaseString]:
    """Yield mutmut's first change of a string. Its further changes only change the case."""
    yield from islice(operator_string(node), 1)


_OPERATORS = [
    (kind, _mutate_string_once if operator is operator_string else operator)
    for kind, operator in mutation_operators
]


def _is_literal_sign(node: cst.CSTNode) -> bool:
    """Return True for the sign of an integer literal: ``dim=-1`` can be the same as ``dim=1``."""
    return isinstance(node, cst.UnaryOperation) and isinstance(node.expression, cst.Integer)


def _iter_mutants(source: str, module: str) -> Iterator[Mutant]:
    metadata_wrapper = MetadataWrapper(cst.parse_module(source))
    ignored_code = IgnoredCode(set(), set(), set())
    visitor = _CodeMutationVisitor(_OPERATORS, ignored_code)
    tree = metadata_wrapper.visit(visitor)
    positions = metadata_wrapper.resolve(PositionProvider)
    parents = metadata_wrapper.resolve(ParentNodeProvider)
    for mutation in visitor.mutations:
        if _changes_only_text(mutation.original_node, mutation.mutated_node):
            continue
        if _is_literal_sign(mutation.original_node):
            continue
        statement = _find_statement(mutation.original_node, parents)
        first_line = positions[statement].start.line
        last_line = _find_last_line(mutation.original_node, statement, positions, parents)
        changed_tree = tree.deep_replace(mutation.original_node, mutation.mutated_node)
        changed_source = cst.ensure_type(changed_tree, cst.Module).code
        old_text, new_text = _find_changed_lines(source, changed_source)
        yield Mutant(
            module=module,
            function=_get_qualified_name(statement, parents),
            lines=(first_line, last_line),
            before=old_text,
            after=new_text,
            context=_read_context(source, statement, positions, parents),
            source=changed_source,
        )


def _find_statement(node: cst.CSTNode, parents) -> cst.CSTNode:
    while not isinstance(node, cst.BaseSmallStatement | cst.BaseCompoundStatement | cst.Module):
        node = parents[node]
    return node


def _find_last_line(node: cst.CSTNode, statement: cst.CSTNode, positions, parents) -> int:
    """Return the last line of ``statement``, or of the clause with ``node`` of an ``if``."""
    if not isinstance(statement, cst.BaseCompoundStatement) or node is statement:
        return positions[statement].end.line
    while parents[node] is not statement:
        node = parents[node]
    return positions[node].end.line


def _find_enclosing_definitions(node: cst.CSTNode, parents) -> list[cst.FunctionDef | cst.ClassDef]:
    """Return the functions and classes that contain or are ``node``, innermost first."""
    definitions = []
    while not isinstance(node, cst.Module):
        if isinstance(node, cst.FunctionDef | cst.ClassDef):
            definitions.append(node)
        node = parents[node]
    return definitions


def _get_qualified_name(node: cst.CSTNode, parents) -> str:
    return ".".join(
        reversed(
            [definition.name.value for definition in _find_enclosing_definitions(node, parents)]
        )
    )


def _read_context(source: str, node: cst.CSTNode, positions, parents) -> str:
    """Return the text of the outermost function around ``node``."""
    functions = [
        definition
        for definition in _find_enclosing_definitions(node, parents)
        if isinstance(definition, cst.FunctionDef)
    ]
    if not functions:
        return ""
    outermost_range = positions[functions[-1]]
    return "\n".join(source.splitlines()[outermost_range.start.line - 1 : outermost_range.end.line])


def _find_changed_lines(before: str, after: str) -> tuple[str, str]:
    """Return the lines of ``before`` and of ``after`` that differ, each joined into one line."""
    lines_before = before.splitlines()
    lines_after = after.splitlines()
    diff_blocks = SequenceMatcher(None, lines_before, lines_after, autojunk=False).get_opcodes()
    changed_blocks = [diff_block for diff_block in diff_blocks if diff_block[0] != "equal"]
    if not changed_blocks:
        return "", ""
    old_lines = lines_before[changed_blocks[0][1] : changed_blocks[-1][2]]
    new_lines = lines_after[changed_blocks[0][3] : changed_blocks[-1][4]]
    return _join_lines(old_lines), _join_lines(new_lines)


def _join_lines(lines: list[str]) -> str:
    return " ".join(line.strip() for line in lines)
