"""Comparison of an answer with a ground truth.

The kind of the ground truth determines what must be equal:

- letter, as in "A" and "(B)": the letter of the option. The text of the option may follow.
- verdict ("yes", "no", "true", "false"): the word. A remark may follow.
- number, as in "42", "1/2", "5 km" and "ten": the value. Units must not contradict each other.
- formula, as in "x^2+1" and "[0, 1)": the value, computed by math-verify.
- other text, as in "Paris": the words.
"""

import logging
import re
from collections.abc import Iterator

from agent_system.environments.env_package.dataset.answer_text import (
    normalize_answer,
    normalize_words,
)
from agent_system.environments.env_package.dataset.answers import ExtractedAnswer, extract_answer
from agent_system.environments.env_package.dataset.formula_size import is_formula_too_large
from agent_system.environments.env_package.dataset.written_numbers import (
    UNIT_NAMES,
    WrittenNumber,
    is_same_number,
    read_number,
)

EXTRA_CHARACTERS = 2000  # an answer may have twice the characters of the truth plus this number
MAX_FORMULA_LENGTH = 300  # characters; a longer formula is compared as text
MAX_LIST_DEPTH = 3  # maximum nesting of lists, such as 2 for [[1], [2]]

_SINGLE_LETTER = re.compile(r"\(?([A-Za-z])[).]?")
_OPTION_LETTER = re.compile(
    r"(?:(?:(?:the\s+)?(?:option|choice|answer|letter|antwort|opci[oó]n|letra|la|el|вариант)\s+)"
    r"|选项\s*|故?选择?\s*)?"
    r"(?:\(\s*([A-Za-z])\s*\)|\[\s*([A-Za-z])\s*\]|([A-Za-z])\s*[).:]|([A-Za-z]))"
    r"(?:(?<=[).:])\s*(?!(?:or|and)\b|[/&]|\(?[A-Za-z]\)|[A-Za-z]$)(?P<text>\S.*)|\s+-\s+(?P<after>\S.*)"
    r"|\s+\((?P<remark>[^()]*)\)|;\s(?P<clause>.*))?",
    re.IGNORECASE | re.DOTALL,
)
_LABELLED_OPTION = re.compile(r"(?:\(([A-Z])\)|([A-Z])[).:])\s+(\S.*)", re.DOTALL)
_OPTION_STATEMENT = re.compile(
    r"(?:[^,]{0,80},\s+)?(?:(?i:option|choice)\s+)?\(?([A-Z])\)?\s+is\s+(?:the\s+)?(?:correct|right|best|answer)\b.*",
    re.DOTALL,
)
_VERDICT_WITH_REMARK = re.compile(
    r"(yes|no|true|false)\s*[,.;:!-](?!\s*(?:wait|actually|sorry)\b).*", re.IGNORECASE | re.DOTALL
)
_VERDICTS = ("yes", "no", "true", "false")
_LIST_CONJUNCTION = re.compile(r"(?:\s*,)?\s+(?:or|and)\s+")
_FINAL_PARENTHESIS = re.compile(r"\s*\([^()]*\)$")
_LATEX_COMMAND = re.compile(r"\\[a-zA-Z]+")
_FORMULA_NAME = re.compile(
    r"pi|e|i|a?(?:sin|cos|tan|sec|csc|cot)h?|log|ln|exp|sqrt|oo|inf|infty|mod", re.IGNORECASE
)
_FORMULA_SIGN = re.compile(r"[-+*/^=<>(){}\[\]|!,]|\d[a-zA-Z]")
_DATE = re.compile(r"(?<![\d.,])0\d|\d{4}-\d{1,2}-\d{1,2}|\d{1,2}/\d{1,2}/\d{2,4}|\d:\d")
_ROOT_OR_FUNCTION = re.compile(
    r"\\(?:frac|sqrt|pi|log|ln|exp|sin|cos|tan|binom)|\^|\d!|\b(?:e|pi|sqrt)\b"
)
_UNEVALUATED_OPERATOR = re.compile(r"\\(?:i*int|oint|sum|prod|lim)(?![a-z])|\\frac\s*\{d\}")
_CALCULATION = re.compile(r"\d\s*(?:[-+*]|\\times|\\cdot)\s*\d")
_RELATION_SIGN = re.compile(r"[=<>]|\\(?:in|le|ge|leq|geq)(?![a-z])")
_VARIABLES_BEFORE_VALUE = re.compile(
    r"^\(?[a-zA-Z]\w?(?:\s*,\s*[a-zA-Z]\w?)*\)?\s*(?:=|\\in(?![a-z]))\s*"
)
_UNIT_AFTER_FORMULA = re.compile(
    r"(.*\S)\s+(?:square\s+|cubic\s+)?([a-z]{2,})(?:\s*\^\s*\{?[23]\}?)?", re.DOTALL
)
# Plain spellings that math-verify reads as products of letters, and their LaTeX.
_LATEX_SPELLINGS = (
    (re.compile(r"(?<![\\a-zA-Z])(pi|infty)(?![a-zA-Z])"), r"\\\1 "),
    (re.compile(r"\\?\bsqrt\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
)
_REASON_WORD = re.compile(r"\b(?:because|since|as|where|when|if)\b", re.IGNORECASE)
_CLOSING_BRACKETS = {"(": ")", "[": "]", "{": "}"}


def matches_truth(answer: ExtractedAnswer, truth: str) -> bool:
    """Return True if one of the possible readings of ``answer`` equals the ground truth."""
    truth_text = normalize_answer(truth)
    max_answer_length = EXTRA_CHARACTERS + 2 * len(truth)
    answer_texts = [
        normalize_answer(candidate_text)
        for candidate_text in answer.candidate_texts
        if len(candidate_text) <= max_answer_length
    ]
    if letter := _SINGLE_LETTER.fullmatch(truth_text):
        accepts_lower_case = (
            answer.has_answer_mark or len(answer.candidate_texts) == 1 or letter[1].islower()
        )
        return any(
            _read_option_letter(text, accepts_lower_case) == letter[1].casefold()
            for text in answer_texts
        )
    if any(
        normalize_words(answer_text) == normalize_words(truth_text) for answer_text in answer_texts
    ):
        return True
    if normalize_words(truth_text) in _VERDICTS:
        answer_verdicts = [
            match[1]
            for answer_text in answer_texts
            if (match := _VERDICT_WITH_REMARK.fullmatch(answer_text))
        ]
        return normalize_words(truth_text) in map(str.casefold, answer_verdicts)
    truth_number = _read_truth_number(truth_text)
    if truth_number is not None:
        number_texts = [*answer_texts, *map(normalize_answer, answer.number_texts)]
        return any(_is_equal_number(answer_text, truth_number) for answer_text in number_texts)
    if _is_formula(truth_text):
        return any(
            _is_same_formula(answer_text, truth_text, MAX_LIST_DEPTH)
            for answer_text in answer_texts
        )
    return any(_are_same_words(answer_text, truth_text) for answer_text in answer_texts)


def canonicalize_answer(text: str) -> str | None:
    r"""Return a canonical text of the answer in ``text``, or None if there is no answer.

    Equal answers have equal canonical texts. Formulas are an exception, because they are not
    evaluated: ``1+x`` and ``x+1`` differ.

    >>> canonicalize_answer("It is 0.5.") == canonicalize_answer("\\boxed{1/2}")
    True
    """
    answer = extract_answer(text)
    if answer is None or len(answer.candidate_texts[-1]) > EXTRA_CHARACTERS:
        return None
    for candidate_text in (*answer.candidate_texts, *reversed(answer.number_texts)):
        number = read_number(normalize_answer(candidate_text))
        if number is not None:
            return f"{number.value} {number.unit}".strip()
    last_candidate = normalize_answer(answer.candidate_texts[-1])
    letter = _read_option_letter(last_candidate, answer.has_answer_mark)
    return letter or normalize_words(last_candidate) or None


def _read_option_letter(answer_text: str, accepts_lower_case: bool) -> str | None:
    """Return the letter, in lower case, of the option that ``answer_text`` names, or None.

    Without ``accepts_lower_case``, a text such as "a" is a word.
    """
    match = _OPTION_STATEMENT.fullmatch(answer_text) or _OPTION_LETTER.fullmatch(answer_text)
    if match is None:
        return None
    letter = next(filter(None, match.groups()), "")
    is_option = accepts_lower_case or letter.isupper() or answer_text != letter
    return letter.casefold() if is_option else None


def _read_truth_number(text: str) -> WrittenNumber | None:
    number = None if _DATE.search(text) else read_number(text)
    # A number before a capitalised word is part of a name, such as "50 Cent".
    is_name = number is not None and number.unit and re.search(r"\d\s+[A-Z][a-z]", text)
    return None if is_name else number


def _is_equal_number(answer_text: str, truth: WrittenNumber) -> bool:
    # In a chain of equations (x = 1 + 2 = 3) the text after the last sign is the answer.
    if not _REASON_WORD.search(answer_text):
        answer_text = answer_text.rsplit("=", 1)[-1].strip()
    if truth.unit:
        answer_text = re.sub(r"(?<=\d)(?=[a-zA-Z]$)", " ", answer_text)  # read 5m as 5 m
    answer_number = read_number(answer_text)
    if answer_number is not None:
        return is_same_number(answer_number, truth)
    # Accept a root or a power, such as sqrt(2), but not an unevaluated calculation (1 + 2).
    is_root_or_function = _ROOT_OR_FUNCTION.search(answer_text) and not _CALCULATION.search(
        answer_text
    )
    latex_fraction = f"\\frac{{{truth.value.numerator}}}{{{truth.value.denominator}}}"
    return bool(is_root_or_function) and _have_equal_values(answer_text, latex_fraction)


def _is_formula(text: str) -> bool:
    if _LATEX_COMMAND.search(text):
        return True
    if text == "pi":
        return True
    text = _LIST_CONJUNCTION.sub(", ", text)
    if not text.isascii() or _DATE.search(text) or not _FORMULA_SIGN.search(text):
        return False
    words = re.findall(r"[A-Za-z]+", text)
    return all(len(word) == 1 or _FORMULA_NAME.fullmatch(word) for word in words)


def _is_same_formula(answer_text: str, truth_text: str, remaining_depth: int) -> bool:
    if "".join(answer_text.split()) == "".join(truth_text.split()):
        return True
    if not _RELATION_SIGN.search(truth_text):
        answer_text = _VARIABLES_BEFORE_VALUE.sub("", answer_text)
        answer_text = _remove_unit(answer_text)
    answer_list, truth_list = _split_list(answer_text), _split_list(truth_text)
    if truth_list is None or not remaining_depth:
        return _is_same_element(answer_text, truth_text)
    if answer_list is None or not _are_brackets_compatible(answer_list, truth_list):
        return False
    truth_brackets, truth_members = truth_list
    answer_members = answer_list[1]
    if len(answer_members) != len(truth_members):
        return False
    if truth_brackets in ("", "{"):
        return _are_same_members(answer_members, truth_members, remaining_depth - 1)
    return all(
        _is_same_formula(answer_member, truth_member, remaining_depth - 1)
        for answer_member, truth_member in zip(answer_members, truth_members, strict=True)
    )


def _is_same_element(answer_text: str, truth_text: str) -> bool:
    answer_number, truth_number = read_number(answer_text), read_number(truth_text)
    if answer_number is not None and truth_number is not None:
        return is_same_number(answer_number, truth_number)
    if not _is_formula(truth_text) and truth_number is None:
        return _are_same_words(answer_text, truth_text)
    return _have_equal_values(answer_text, truth_text)


def _remove_unit(formula: str) -> str:
    """Return ``formula`` without the unit at its end: ``12\\pi cm^2`` gives ``12\\pi``.

    A unit of one letter is kept.
    """
    match = _UNIT_AFTER_FORMULA.fullmatch(formula)
    is_unit = match and (match[2] in UNIT_NAMES or match[2].rstrip("s") in UNIT_NAMES)
    return match[1] if match and is_unit else formula


def _are_brackets_compatible(
    first_list: tuple[str, list[str]], second_list: tuple[str, list[str]]
) -> bool:
    """Return True if two lists, each (brackets, members), have compatible brackets.

    Lists of two members may be intervals, and braces mark a set. Their brackets must be equal. In
    all other cases it suffices that both lists have brackets, or that both have none.
    """
    if len(first_list[1]) == 2 or "{" in (first_list[0][:1], second_list[0][:1]):
        return first_list[0] == second_list[0]
    return bool(first_list[0]) == bool(second_list[0])


def _are_same_members(
    answer_members: list[str], truth_members: list[str], remaining_depth: int
) -> bool:
    unmatched_truths = list(truth_members)
    for member in answer_members:
        matching_truth = next(
            (
                truth_member
                for truth_member in unmatched_truths
                if _is_same_formula(member, truth_member, remaining_depth)
            ),
            None,
        )
        if matching_truth is None:
            return False
        unmatched_truths.remove(matching_truth)
    return True


def _split_list(text: str) -> tuple[str, list[str]] | None:
    """Return the brackets around a list and its members, or None if ``text`` is no list.

    >>> _split_list("[0, 1)")
    ('[)', ['0', '1'])
    """
    text = _LIST_CONJUNCTION.sub(", ", text.replace("\\{", "{").replace("\\}", "}").strip())
    list_text, brackets = text, ""
    if (
        len(text) > 1
        and text[0] in _CLOSING_BRACKETS
        and text[-1] in ")]}"
        and _is_in_brackets(text)
    ):
        list_text, brackets = text[1:-1], text[0] if text[0] == "{" else text[0] + text[-1]
    members = list(_split_at_commas(list_text))
    return (brackets, members) if len(members) > 1 or brackets == "{" else None


def _is_in_brackets(text: str) -> bool:
    bracket_depth = 0
    for position, character in enumerate(text):
        bracket_depth += (character in "([{") - (character in ")]}")
        if bracket_depth == 0:
            return position == len(text) - 1
    return False


def _split_at_commas(text: str) -> Iterator[str]:
    """Split ``text`` at the commas that are not inside brackets."""
    bracket_depth = part_start = 0
    for position, character in enumerate(text):
        bracket_depth += (character in "([{") - (character in ")]}")
        if character in ",;" and bracket_depth == 0:
            yield text[part_start:position].strip()
            part_start = position + 1
    yield text[part_start:].strip()


def _are_same_words(answer_text: str, truth_text: str) -> bool:
    text_without_parenthesis = (
        answer_text[1:-1]
        if answer_text[:1] + answer_text[-1:] == "()"
        else _FINAL_PARENTHESIS.sub("", answer_text)
    )
    if normalize_words(truth_text) in (
        normalize_words(answer_text),
        normalize_words(text_without_parenthesis),
    ):
        return True
    truth_option = _LABELLED_OPTION.fullmatch(truth_text)
    if truth_option is None:
        return False
    truth_letter = (truth_option[1] or truth_option[2]).casefold()
    truth_option_text = normalize_words(truth_option[3])
    answer_option = _LABELLED_OPTION.fullmatch(answer_text)
    if answer_option is not None:
        answer_letter = (answer_option[1] or answer_option[2]).casefold()
        return (
            answer_letter == truth_letter and normalize_words(answer_option[3]) == truth_option_text
        )
    return (
        _read_option_letter(answer_text, accepts_lower_case=False) == truth_letter
        or normalize_words(answer_text) == truth_option_text
    )


def _have_equal_values(answer_text: str, truth_text: str) -> bool:
    if (
        len(answer_text) > MAX_FORMULA_LENGTH
        or is_formula_too_large(answer_text)
        or is_formula_too_large(truth_text)
    ):
        return False
    # A sum, an integral or a limit that occurs only in the answer is an unevaluated calculation. It
    # is not accepted.
    if not set(_UNEVALUATED_OPERATOR.findall(answer_text)) <= set(
        _UNEVALUATED_OPERATOR.findall(truth_text)
    ):
        return False
    for spelling_pattern, latex_replacement in _LATEX_SPELLINGS:
        answer_text, truth_text = (
            spelling_pattern.sub(latex_replacement, answer_text),
            spelling_pattern.sub(latex_replacement, truth_text),
        )
    # Hide the warning of math-verify about a missing timeout. The environment pool limits the time.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    from math_verify import parse, verify

    parsed_answer = parse(f"\\boxed{{{answer_text}}}", parsing_timeout=0)
    parsed_truth = parse(f"\\boxed{{{truth_text}}}", parsing_timeout=0)
    # The result has fewer than two items if math-verify could not parse the formula.
    if len(parsed_answer) < 2 or len(parsed_truth) < 2:
        return False
    return verify(parsed_truth, parsed_answer, timeout_seconds=0)
