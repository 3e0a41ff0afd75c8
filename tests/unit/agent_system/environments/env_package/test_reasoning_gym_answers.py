"""Tests of graders that evaluate: no answer runs as code, and malformed numbers get reward 0."""

import ast
import importlib.util
import inspect
import math
import re
import warnings
from pathlib import Path

import pytest

from agent_system.environments.env_package.reasoning_gym.answers import (
    SANITIZERS_OF_EVALUATED_ANSWERS,
    normalize_grade,
    sanitize_answer,
)
from agent_system.environments.env_package.reasoning_gym.formulas import (
    UnreadableFormulaError,
    compute_value,
    list_integers,
    parse_formula,
    parse_list,
)
from agent_system.environments.env_package.reasoning_gym.package import PACKAGE, ReasoningGymEnv

LISTS = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")
FORMULAS = ("countdown", "intermediate_integration", "puzzle24", "simple_integration")
NAMES = ("x", "C")
NOT_FORMULAS = (
    "",
    "1 +",
    "1, 2",
    "[1]",
    "'1'",
    "b'1'",
    "f'{1}'",
    "1j",
    "True",
    "None",
    "...",
    "1 if 1 else 2",
    "lambda: 1",
    "(y := 1)",
    "x.real",
    "x . real",
    "x . _\uff3fclass\uff3f\uff3f",
    "x[0]",
    "[i for i in (1, 2)]",
    "[0 for x . real in [1]]",
    "y",
    "E",
    "S('1')",
    "sin",
    "sin()",
    "sin(1, 2)",
    "sin(x=1)",
    "sin(*[1])",
    "__import__('os')",
    "eval(x)",
    "x @ x",
    "x // 2",
    "x % 2",
    "x << 9",
    "x ^ 2",
    "~x",
    "not x",
    "x == x",
    "x and x",
    "1e999",
    "9" * 5000,
    str(10**13),
    "9 ** 9 ** 9",
    "(9 ** 60) ** 60",
    "9 ** (60 * 60)",
    "9 ** (99999999 + 0 * x)",
    "9 ** (64 / 0.001)",
    "x ** 1000",
    "x ** -1000",
    "x ** sin(1000)",
    "-" * 999 + "1",
    "(" * 300 + "1" + ")" * 300,
    "+".join("1" * 600),
    "1\x00",
    "\ud83d",
    "1; 2",
    "1\n2",
)


@pytest.mark.parametrize("text", NOT_FORMULAS)
def test_text_that_is_no_formula_is_refused(text):
    with pytest.raises(UnreadableFormulaError):
        parse_formula(text, NAMES, {"sin"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" (1 + 2)*3 ", "(1 + 2) * 3"),
        ("-x**2/2 + C", "-x ** 2 / 2 + C"),
        ("x**(1/2)", "x ** (1 / 2)"),
        ("2**x * sin(2*x)", "2 ** x * sin(2 * x)"),
        ("\uff58 + 0x10 + 1_0", "x + 16 + 10"),
        ("x**-3", "x ** (-3)"),
    ],
)
def test_formula_is_rebuilt_from_its_parsed_form(text, expected):
    formula = parse_formula(text, NAMES, {"sin"})
    assert ast.dump(formula) == ast.dump(ast.parse(expected, mode="eval").body)


def test_arithmetic_has_an_exact_value_and_no_names_or_powers():
    for text in ("x", "2 ** 2", "sin(1)"):
        with pytest.raises(UnreadableFormulaError):
            parse_formula(text)
    formula = parse_formula("0.1 * 3 - 1 / 3 + (-2)")
    assert str(compute_value(formula)) == "-61/30"
    assert list_integers(parse_formula("7 * (3 + 3) - 12")) == [3, 3, 7, 12]


@pytest.mark.parametrize(
    "text",
    [
        "oracle_answer",
        "[oracle_answer]",
        "[[valid_solutions[0]]]",
        "[x for x in 'ab']",
        "[*'ab']",
        "[f'a']",
        "{1: 2}",
        "{1, 2}",
        "b'a'",
        "[b'a']",
        "[None]",
        "[1e999]",
        "[True]",
        "[1.5]",
        "[1] * 9",
        "'a' * 9",
        "['a' + 'b']",
        "[[[[1]]]]",
        "[" * 150,
        "[" * 90 + "]" * 90,
        "[" + "1," * 9_999 + "1]",
        "[" + "1," * 20_000 + "]",
        "[0 for license . _\uff3fclass\uff3f\uff3f in [1]]",
        "\x00",
        "'\ud83d",
        "",
    ],
)
def test_text_that_is_no_literal_list_is_refused(text):
    with pytest.raises(UnreadableFormulaError):
        parse_list(text)


def test_lists_of_texts_and_numbers_are_parsed():
    assert parse_list(" [['Q', '_'], ('_', -1)] ") == [["Q", "_"], ("_", -1)]
    assert parse_list("'\\x41'") == "A"


DUNDER = "_\uff3f{}\uff3f\uff3f"  # NFKC normalises the full-width signs to a dunder name
CODE = (
    f"[0 for license . {DUNDER.format('class')} . {DUNDER.format('getitem')} in "
    f"[license . {DUNDER.format('class')} . {DUNDER.format('init')} . {DUNDER.format('globals')} "
    "['sys'] . modules ['builtins'] . MARK]] + [license['x']]",
    "MARK('x')",
    "[MARK('x')]",
    "[x for x in [MARK('x')]]",
    "f'{MARK(1)}'",
    "(lambda: MARK('x'))()",
    "1 if MARK('x') else 2",
    "MARK",
)


def make_env(generator):
    env = ReasoningGymEnv(
        PACKAGE.read_settings({"task": generator, "train_tasks": 1, "val_tasks": 1})
    )
    env.reset({"number": 0}, 0)
    return env


@pytest.mark.parametrize("generator", [*LISTS, *FORMULAS])
def test_no_answer_runs_and_grader_names_get_reward_0(generator, monkeypatch):
    pytest.importorskip("reasoning_gym")
    executed = []
    monkeypatch.setattr(
        "builtins.MARK", lambda *arguments: executed.append(arguments), raising=False
    )
    env = make_env(generator)
    locals_ = ("oracle_answer", "valid_solutions", "entry", "answer", "x", "user_expr", "integrand")
    grader_names = [
        form.format(name) for name in locals_ for form in ("{}", "[{}]", "[[{}]]", "{}[0]")
    ]
    for answer in [*CODE, *grader_names]:
        assert env.step(answer)[1] == 0.0 or answer == "x", answer
    assert not executed


@pytest.mark.parametrize("generator", LISTS)
def test_literal_list_gets_the_partial_reward_of_the_grader(generator):
    pytest.importorskip("reasoning_gym")
    env = make_env(generator)
    answer = str(env.entry["answer"])
    rows = [line.split() for line in answer.splitlines()]
    as_list = {
        "binary_matrix": rows,
        "n_queens": rows,
        "spiral_matrix": answer.split(),
        "string_insertion": list(answer),
    }[generator]
    assert 0 < env.step(repr(as_list))[1] < 1 and env.step(answer)[1] == 1


def test_every_evaluating_grader_has_a_reader():
    module_spec = importlib.util.find_spec("reasoning_gym")
    if module_spec is None or module_spec.origin is None:
        pytest.skip("reasoning_gym is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from reasoning_gym.factory import DATASETS
    evaluates = re.compile(r"\b(eval|exec|parse_expr|sympify|compile|__import__|loads)\(answer\b")
    evaluating = set()
    for name, (dataset, _) in DATASETS.items():
        source = Path(inspect.getfile(dataset)).read_text(encoding="utf-8")
        calls = {call for call in evaluates.findall(source) if call != "loads"}
        if calls:
            evaluating.add(name)
    assert evaluating and evaluating == set(SANITIZERS_OF_EVALUATED_ANSWERS)


def test_copied_integral_is_no_integration():
    entry = {"answer": "x**2/2 + C", "metadata": {"variable": "x"}}
    assert sanitize_answer("Integral(x, x) + C", "intermediate_integration", entry) is None
    unsolved = {"answer": "Integral(x**x, x) + C", "metadata": {"variable": "x"}}
    assert sanitize_answer(unsolved["answer"], "intermediate_integration", unsolved)


@pytest.mark.parametrize(
    ("answer", "is_accepted"),
    [
        ("7 * (3 - 3 / 7)", False),
        ("3 * (3 + 7) - 6", False),
        ("6 * 4 + 1 - 1", False),
        ("(3 + 5) * 3 * 7 / 7", False),
        ("(7 - 3) * (3 + 3)", True),
        ("(3 + 3) * (7 - 3) + 0.5", False),
        ("3 / 0 + 3 + 7 + 3", False),
    ],
)
def test_puzzle24_requires_the_given_numbers_and_exactly_24(answer, is_accepted):
    entry = {"answer": "", "metadata": {"numbers": [3, 3, 7, 3]}}
    assert (sanitize_answer(answer, "puzzle24", entry) is not None) == is_accepted


@pytest.mark.parametrize(
    ("answer", "oracle", "is_accepted"),
    [
        *[
            (text, "12", False)
            for text in ("nan", "NaN", "-inf", "Infinity", "+iNf", "sNaN", "nan12")
        ],
        *[(text, "3.0 - 2.0i", False) for text in ("nan", "nanj", "3 + nani", "infi", "NaN+infj")],
        *[(text, "['1', '2']", False) for text in ("[NaN, NaN]", "['nan', '2']", "[1, 1e999]")],
        *[
            (text, "5", False)
            for text in ("1e999", "1E+400", "-1_0e99_99", "9" * 400, "\uff11e999")
        ],
        *[
            (text, "5", True)
            for text in ("5", "1e3", "1e-999", "the 5 infinite bananas", "0x5e99999")
        ],
        *[(text, "inform", True) for text in ("nan", "inf", "1e999")],
    ],
)
def test_non_finite_number_is_refused_where_a_number_is_expected(answer, oracle, is_accepted):
    assert (sanitize_answer(answer, "chain_sum", {"answer": oracle}) is not None) == is_accepted


@pytest.mark.parametrize("generator", ["complex_arithmetic", "number_sorting"])
@pytest.mark.parametrize("sign", ["nan", "inf", "-inf", "1e999", "NaN", "Infinity"])
def test_non_finite_constant_does_not_succeed(generator, sign):
    pytest.importorskip("reasoning_gym")
    env = make_env(generator)
    size = str(env.entry["answer"]).count(",") + 1
    for answer in (sign, f"{sign}+{sign}j", f"[{', '.join([sign] * size)}]", f"['{sign}']"):
        _, reward, _, info = env.step(answer)
        assert reward == 0.0 and not info["won"], answer


@pytest.mark.parametrize(
    ("grade", "expected"),
    [
        *[(bad, 0.0) for bad in (math.nan, math.inf, -math.inf, None, 1 + 0j, "1", [1], -0.1, 1.1)],
        *[(1 + 1e-9, 1.0), (1, 1.0), (True, 1.0), (0.5, 0.5), (0, 0.0)],
    ],
)
def test_grade_is_a_number_from_0_to_1(grade, expected):
    assert normalize_grade(grade) == expected


@pytest.mark.parametrize(
    "generator", ["propositional_logic", "game_of_life", "jugs", "gsm_symbolic"]
)
def test_deep_and_large_answers_are_wrong(generator):
    pytest.importorskip("reasoning_gym")
    env = make_env(generator)
    for answer in ("(" * 20_000, "[" * 20_000, "9" * 20_000, "\x00", "\ud83d", "{}", "null"):
        assert env.step(answer)[1] < 0.5 and not env.step(answer)[3]["won"]
