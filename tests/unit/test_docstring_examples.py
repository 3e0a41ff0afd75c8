"""The examples in docstrings (lines that begin with ``>>>``) give the results that they show."""

import ast
import doctest
import importlib
import inspect
from pathlib import Path

import pytest

from scripts.dev.measure_code import find_docstrings

ROOT = Path(__file__).resolve().parents[2]
MODULES = [
    path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
    for package in ("verl", "agent_system", "rlvcr", "scripts", "experiments")
    for path in sorted((ROOT / package).rglob("*.py"))
    if "  >>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_give_their_results(name: str):
    module = importlib.import_module(name)
    parser = doctest.DocTestParser()
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    failures: list[str] = []
    # Decorated functions are not found by ``doctest.DocTestFinder``, but by their source.
    for _, docstring in find_docstrings(ast.parse(inspect.getsource(module))):
        text = inspect.cleandoc(str(docstring.value))
        examples = parser.get_doctest(text, dict(vars(module)), name, name, docstring.lineno)
        runner.run(examples, out=failures.append)
    assert runner.tries > 0 and not failures, "".join(failures)
