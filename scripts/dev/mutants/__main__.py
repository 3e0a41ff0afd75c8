"""Command line of ``python -m scripts.dev.mutants``, described in the package's docstring."""

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from scripts.dev.mutants import results as outcomes
from scripts.dev.mutants.forks import ForkResult, run_one
from scripts.dev.mutants.generate import Mutant, make_mutants
from scripts.dev.mutants.mutant_runner import (
    CollectedTests,
    Outcome,
    Trace,
    collect_tests,
    prepare,
    run_function_mutants,
    run_import_mutants,
    trace_tests,
)
from scripts.dev.mutants.results import ModuleRow, MutantResult, Results
from scripts.dev.mutants.targets import ROOT, TARGETS, Target

DAY = 86400.0
REQUIRED = 0.95


def main(argv: Sequence[str] | None = None) -> int:
    """Run the pending mutants and write the page.

    Return 1 if too few mutants were killed, if a mutant was not run, or if a reason is missing.
    """
    parser = argparse.ArgumentParser(
        description=outcomes.HEAD, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("modules", nargs="*", help="paths of modules; all of them by default")
    parser.add_argument("--workers", type=int, default=2, help="mutants that run at once")
    parser.add_argument("--fresh", action="store_true", help="ignore earlier results")
    parser.add_argument("--report", action="store_true", help="run nothing, write the page")
    args = parser.parse_args(argv)
    module_paths = [path.strip("/") for path in args.modules]
    _refuse_unknown(module_paths)
    if not args.report:
        prepare()
    results = Results()
    rows = []
    for target in TARGETS:
        rows += _run_target(target, module_paths, results, args)
    return _write_report(rows, has_all_modules=not module_paths)


def _refuse_unknown(chosen: Sequence[str]) -> None:
    known = {_relative_path(path) for target in TARGETS for path in target.list_modules()}
    unknown = sorted(set(chosen) - known)
    if unknown:
        raise SystemExit(
            f"modules {', '.join(unknown)} are not in targets.py; known: {', '.join(sorted(known))}"
        )


def _relative_path(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _run_target(
    target: Target, chosen: Sequence[str], results: Results, args: argparse.Namespace
) -> list[ModuleRow]:
    """Run the pending mutants of ``target``, of all modules or of ``chosen``. Return table rows."""
    files = [path for path in target.list_modules() if not chosen or _relative_path(path) in chosen]
    if not files:
        return []
    mutants = {_relative_path(path): make_mutants(path, ROOT) for path in files}
    all_mutants = [mutant for module_mutants in mutants.values() for mutant in module_mutants]
    tests_hash = outcomes.hash_tests(target)
    pending = all_mutants if args.fresh else results.select_pending(all_mutants, tests_hash)
    if pending and not args.report:
        _log_line(f"{target.name}: {len(pending)} of {len(all_mutants)} mutants to run")
        _run_mutants(target, pending, _Progress(results, pending, tests_hash), args.workers)
        # Read the results again: child processes wrote most of them.
        results = Results()
    return [outcomes.count_fates(module, mutated, results) for module, mutated in mutants.items()]


def _run_mutants(
    target: Target, pending: list[Mutant], progress: "_Progress", workers: int
) -> None:
    at_import = [mutant for mutant in pending if mutant.at_import]
    in_functions = [mutant for mutant in pending if not mutant.at_import]
    work = partial(_run_in_warm_process, target, in_functions, pending, progress, workers)
    traced = run_one(target.name, work, DAY)
    progress.count = len(in_functions)
    for mutant_result in run_import_mutants(at_import, traced, workers):
        progress.record_result(mutant_result)


def _run_in_warm_process(
    target: Target,
    in_functions: list[Mutant],
    pending: list[Mutant],
    progress: "_Progress",
    workers: int,
) -> Trace:
    """Collect and trace the tests, and run the mutants of functions, in a child process."""
    traces: list[Trace] = []

    def trace_and_run(warm: CollectedTests) -> None:
        modules = sorted({mutant.module for mutant in pending})
        traced = trace_tests(warm, modules)
        if traced.failed:
            raise RuntimeError(
                f"tests fail without any mutant: {', '.join(traced.failed)}; fix them first"
            )
        _log_line(
            f"{target.name}: {len(traced.seconds)} tests in {sum(traced.seconds.values()):.0f} s"
        )
        traces.append(traced)
        for mutant_result in run_function_mutants(warm, in_functions, traced, workers):
            progress.record_result(mutant_result)

    collect_tests(target, trace_and_run)
    if not traces:
        raise RuntimeError(f"pytest could not collect the tests of {target.name}; see its output")
    return traces[0]


class _Progress:
    """Writer of results that also logs the progress every 100 mutants."""

    def __init__(self, results: Results, pending: Sequence[Mutant], tests_hash: str) -> None:
        self.count = 0
        self._results = results
        self._tests_hash = tests_hash
        self._names = {mutant.stable_key: mutant for mutant in pending}
        self._started = time.monotonic()

    def record_result(self, done: ForkResult[Outcome]) -> None:
        """Write one result to the results file, and log mutants that were not killed."""
        self.count += 1
        if done.answer is not None:
            fate, test = done.answer
        else:
            fate = "timeout" if done.timed_out else "died"
            test = ""
        seconds = round(done.seconds, 2)
        self._results.add(MutantResult(done.name, fate, test, self._tests_hash, seconds))
        mutant = self._names[done.name]
        if fate != "killed":
            _log_line(
                f"  {fate}: {mutant.module}:{mutant.lines[0]} {outcomes.format_change(mutant)}"
            )
        if self.count % 100 == 0 or self.count == len(self._names):
            seconds = time.monotonic() - self._started
            _log_line(f"  {self.count} of {len(self._names)}, {seconds / self.count:.2f} s each")


def _write_report(rows: Sequence[ModuleRow], *, has_all_modules: bool) -> int:
    reasons = outcomes.read_reasons()
    page = outcomes.format_page(rows, reasons)
    unknown = sum(row.unknown for row in rows)
    if has_all_modules and not unknown:
        outcomes.PAGE.write_text(page)
    else:
        sys.stdout.write(page)
    mutants = sum(row.mutants for row in rows)
    killed = sum(row.killed for row in rows)
    survivors = [mutant for row in rows for mutant in row.survivors]
    bare = sum(not outcomes.has_reason(mutant, reasons) for mutant in survivors)
    _log_line(f"{killed} of {mutants} killed, {unknown} not run, {bare} survivors without a reason")
    return int(unknown > 0 or bare > 0 or killed < REQUIRED * mutants)


def _log_line(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
