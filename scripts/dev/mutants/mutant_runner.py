"""Run the tests of a target against its mutants, in forks of a process that has collected them.

The tests are traced once. For each mutant of a function, a child swaps the function's code and runs
the tests that reach it.
"""

import gc
import importlib
import sys
import threading
import time
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.machinery import SourceFileLoader

import pytest

from scripts.dev.mutants.forks import ForkJob, ForkResult, run_jobs, run_one_job, silence_output
from scripts.dev.mutants.generate import Mutant, find_changed_code, list_inner_code
from scripts.dev.mutants.targets import LIBRARIES, ROOT, Target

TRACE_DEADLINE_S = 1800  # seconds for one traced run of all tests of a target
DEADLINE_MARGIN_S = (
    20  # seconds added to ten times the duration of the tests, as other work shares the cores
)
PYTEST_OPTIONS = ["-qsx", "-pno:cacheprovider", "-pno:terminalreporter", "-pno:xdist"]


@dataclass
class Trace:
    """Duration, executed lines and failures of all tests, from one run without mutants."""

    seconds: dict[str, float] = field(default_factory=dict)  # duration by test
    lines: dict[str, dict[str, set[int]]] = field(default_factory=dict)  # by test and module
    failed: list[str] = field(default_factory=list)

    def select_tests(self, mutant: Mutant) -> list[str]:
        """Return the tests that run the lines of ``mutant``, the fastest first.

        For a mutant that runs at import, return all tests.
        """
        first_line, last_line = mutant.lines
        mutant_lines = set(range(first_line, last_line + 1))
        selected_tests = []
        for test, lines_by_module in self.lines.items():
            if mutant.at_import or lines_by_module.get(mutant.module, set()) & mutant_lines:
                selected_tests.append(test)
        return sorted(selected_tests, key=lambda test: self.seconds[test])

    def compute_deadline(self, tests: Iterable[str]) -> float:
        """Return the seconds after which the run of ``tests`` on a mutant is stopped."""
        return DEADLINE_MARGIN_S + 10 * sum(self.seconds[test] for test in tests)


Outcome = tuple[str, str]  # "killed" or "survived", and the id of the failed test
FunctionKey = tuple[str, str, int]  # file, qualified name and first line of a function


class _FailureRecorder:
    """pytest plugin that records the ids of failed tests."""

    def __init__(self) -> None:
        self.failures: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failures.append(report.nodeid)


class CollectedTests(_FailureRecorder):
    """pytest plugin that calls ``run_session`` with the collected tests and does not run them."""

    def __init__(self, run_session: "Callable[[CollectedTests], None]") -> None:
        super().__init__()
        self.items: dict[str, pytest.Item] = {}
        self.functions: dict[FunctionKey, list[types.FunctionType]] = {}
        self._run_session = run_session

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Index tests and functions, and call ``run_session``. pytest calls it after collection."""
        if session.testsfailed:
            raise session.Interrupted("errors while the tests were collected")
        self.items = {item.nodeid: item for item in session.items}
        gc.collect()
        self.functions = _index_functions()  # before gc.freeze, which hides objects from gc
        gc.freeze()  # so that garbage collection in the children does not copy shared pages
        self._run_session(self)
        return True

    def run(self, nodeid: str, next_test: str | None = None) -> bool:
        """Run the test ``nodeid``. Return True if this test and all earlier tests passed."""
        item = self.items[nodeid]
        next_item = self.items[next_test] if next_test else None
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=next_item)
        return not self.failures


def collect_tests(target: Target, run_session: "Callable[[CollectedTests], None]") -> None:
    """Collect the tests of ``target`` in this process and call ``run_session`` with them."""
    arguments = [*PYTEST_OPTIONS, *target.list_test_paths()]
    if target.deselected_tests:
        arguments += ["-k", " and ".join(f"not {name}" for name in target.deselected_tests)]
    pytest.main(arguments, plugins=[CollectedTests(run_session)])


def trace_tests(collected_tests: CollectedTests, modules: Sequence[str]) -> Trace:
    """Run every test once in a child process, and record the lines of ``modules`` that it runs."""
    module_by_path = {str(ROOT / module): module for module in modules}
    return run_one_job(
        "the trace", lambda: _run_traced(collected_tests, module_by_path), TRACE_DEADLINE_S
    )


def _run_traced(collected_tests: CollectedTests, module_by_path: dict[str, str]) -> Trace:
    silence_output()
    trace = Trace()
    test_ids = list(collected_tests.items)
    for test_id, next_test_id in zip(test_ids, [*test_ids[1:], None], strict=True):
        lines_by_module: dict[str, set[int]] = defaultdict(set)
        tracer = _make_tracer(module_by_path, lines_by_module)
        start_time = time.monotonic()
        threading.settrace(tracer)
        sys.settrace(tracer)
        has_passed = collected_tests.run(test_id, next_test_id)
        sys.settrace(None)
        threading.settrace(None)  # pyright: ignore[reportArgumentType]  None is how it is undone
        trace.seconds[test_id] = time.monotonic() - start_time
        trace.lines[test_id] = dict(lines_by_module)
        if not has_passed:
            trace.failed.append(test_id)
            collected_tests.failures.clear()
    return trace


def _make_tracer(module_by_path: dict[str, str], lines_by_module: dict[str, set[int]]):
    def trace_line(frame: types.FrameType, event: str, _argument: object):
        if event == "line":
            lines_by_module[module_by_path[frame.f_code.co_filename]].add(frame.f_lineno)
        return trace_line

    def trace_call(frame: types.FrameType, _event: str, _argument: object):
        module = module_by_path.get(frame.f_code.co_filename)
        if module is None:
            return None
        lines_by_module[module].add(frame.f_lineno)
        return trace_line

    return trace_call


def run_function_mutants(
    collected_tests: CollectedTests, mutants: Sequence[Mutant], trace: Trace, workers: int
) -> Iterator[ForkResult[Outcome]]:
    """Run the mutants of functions, each in a child of this process."""

    def run_tests(mutant: Mutant, tests: list[str]) -> Outcome:
        silence_output()
        if not swap_code(mutant, collected_tests.functions):
            return ("broken", "no function of this process has the code to replace")
        for test in tests:
            if not collected_tests.run(test):
                return ("killed", test)
        return ("survived", "")

    return _run_mutants(mutants, trace, workers, run_tests)


def _run_mutants(
    mutants: Sequence[Mutant],
    trace: Trace,
    workers: int,
    run_tests: Callable[[Mutant, list[str]], Outcome],
    start_s: float = 0.0,
) -> Iterator[ForkResult[Outcome]]:
    """Call ``run_tests`` in a child for each mutant. A child takes ``start_s`` seconds to start."""

    def make_jobs() -> Iterator[ForkJob[Outcome]]:
        for mutant in mutants:
            tests = trace.select_tests(mutant)
            deadline = start_s + trace.compute_deadline(tests)
            yield ForkJob(mutant.stable_key, partial(run_tests, mutant, tests), deadline)

    return run_jobs(make_jobs(), workers)


def _index_functions() -> dict[FunctionKey, list[types.FunctionType]]:
    """Return all loaded functions of this repository, by file, qualified name and line."""
    functions: dict[FunctionKey, list[types.FunctionType]] = defaultdict(list)
    for loaded_object in gc.get_objects():
        if isinstance(
            loaded_object, types.FunctionType
        ) and loaded_object.__code__.co_filename.startswith(str(ROOT)):
            functions[_function_key(loaded_object.__code__)].append(loaded_object)
    return functions


def _function_key(code: types.CodeType) -> FunctionKey:
    return (code.co_filename, code.co_qualname, code.co_firstlineno)


def swap_code(mutant: Mutant, functions: dict[FunctionKey, list[types.FunctionType]]) -> int:
    """Replace the code of the changed functions by the code of ``mutant``.

    Return the number of replaced functions.
    """
    path = ROOT / mutant.module
    original_code = compile(path.read_text(), str(path), "exec")
    changed_code = compile(mutant.source, str(path), "exec")
    num_swapped_functions = 0
    for old_function_code, new_function_code in find_changed_code(original_code, changed_code):
        for old_code, new_code in _pair_code_objects(old_function_code, new_function_code):
            for function in functions.get(_function_key(old_code), ()):
                function.__code__ = new_code
                num_swapped_functions += 1
    return num_swapped_functions


def _pair_code_objects(
    old: types.CodeType, new: types.CodeType
) -> Iterator[tuple[types.CodeType, types.CodeType]]:
    """Yield (old, new) code objects to swap: the given pair, then pairs of functions inside them.

    A pair with different free variables is skipped: the old function cannot run the new code.
    """
    if old.co_freevars == new.co_freevars:
        yield old, new
    inner_old_code = list_inner_code(old)
    inner_new_code = list_inner_code(new)
    if len(inner_old_code) == len(inner_new_code):
        for old_code, new_code in zip(inner_old_code, inner_new_code, strict=True):
            yield from _pair_code_objects(old_code, new_code)


def run_import_mutants(
    mutants: Sequence[Mutant], trace: Trace, workers: int
) -> Iterator[ForkResult[Outcome]]:
    """Run the mutants of code that runs at import, in children without imported packages."""
    return _run_mutants(mutants, trace, workers, _run_import_tests, start_s=60.0)


def _run_import_tests(mutant: Mutant, tests: list[str]) -> Outcome:
    silence_output()
    _import_mutant(mutant)
    recorder = _FailureRecorder()
    exit_code = pytest.main([*PYTEST_OPTIONS, *tests], plugins=[recorder])
    if exit_code == pytest.ExitCode.OK:
        return ("survived", "")
    return ("killed", recorder.failures[0] if recorder.failures else "import")


def _import_mutant(mutant: Mutant) -> None:
    """Patch the source loader so that imports of the module in this process load the mutant.

    The loader is patched because the import hooks of the shape checks (jaxtyping) use it too.
    """
    mutant_path = str(ROOT / mutant.module)
    original_get_data = SourceFileLoader.get_data
    original_path_stats = SourceFileLoader.path_stats

    def get_mutant_source(self: SourceFileLoader, path: str) -> bytes:
        return mutant.source.encode() if path == mutant_path else original_get_data(self, path)

    def refuse_compiled_file(self: SourceFileLoader, path: str) -> Mapping[str, float]:
        if path == mutant_path:
            raise OSError(f"the compiled file of {path} must not be used: its source is changed")
        return original_path_stats(self, path)

    SourceFileLoader.get_data = get_mutant_source
    SourceFileLoader.path_stats = refuse_compiled_file


def import_test_libraries() -> None:
    """Import the libraries of the children, and make examples of property tests deterministic."""
    for name in LIBRARIES:
        importlib.import_module(name)
    import hypothesis

    hypothesis.settings.register_profile(
        "mutants", derandomize=True, database=None, deadline=None, max_examples=30
    )
    hypothesis.settings.load_profile("mutants")
