"""Command line of ``python -m scripts.dev.mutants``, described in the package's docstring."""

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from scripts.dev.mutants import results as outcomes
from scripts.dev.mutants.forks import ForkResult, run_one_job
from scripts.dev.mutants.generate import Mutant, make_mutants
from scripts.dev.mutants.mutant_runner import (
    CollectedTests,
    Outcome,
    Trace,
    collect_tests,
    import_test_libraries,
    run_function_mutants,
    run_import_mutants,
    trace_tests,
)
from scripts.dev.mutants.results import ModuleRow, MutantResult, Results
from scripts.dev.mutants.targets import ROOT, TARGETS, Target

DAY_S = 86400.0  # deadline of all mutants of a target
REQUIRED_KILL_SHARE = 0.95  # share of the mutants that tests must kill


def main(argv: Sequence[str] | None = None) -> int:
    """Run the mutants that have no valid result, and write the page of results.

    Return 1 if too few mutants were killed, if a mutant was not run, or if a mutant survives for
    which ``reasons.toml`` has no reason. With ``--outdated``, return 1 if a reason names code that
    does not exist.
    """
    parser = argparse.ArgumentParser(
        description=outcomes.HEAD, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("modules", nargs="*", help="paths of modules; all of them by default")
    parser.add_argument("--workers", type=int, default=2, help="mutants that run at once")
    parser.add_argument("--fresh", action="store_true", help="ignore earlier results")
    parser.add_argument("--report", action="store_true", help="run nothing, write the page")
    parser.add_argument(
        "--outdated", action="store_true", help="run nothing, list reasons of code that is gone"
    )
    args = parser.parse_intermixed_args(argv)
    if args.outdated:
        return _print_outdated_accepted_mutants()
    module_paths = [path.strip("/") for path in args.modules]
    _refuse_unknown_modules(module_paths)
    if not args.report:
        import_test_libraries()
    results = Results()
    rows = []
    for target in TARGETS:
        rows += _run_target(target, module_paths, results, args)
    return _write_report(rows, has_all_modules=not module_paths)


def _print_outdated_accepted_mutants() -> int:
    """Print the accepted mutants whose original code no longer exists. Return 1 if there is one."""
    outdated_changes = outcomes.find_outdated_changes(outcomes.read_accepted_mutants())
    for reason, change in outdated_changes:
        sys.stdout.write(f"{reason.module}, {reason.function}: {change}\n")
    return int(bool(outdated_changes))


def _refuse_unknown_modules(chosen_modules: Sequence[str]) -> None:
    known_modules = {_relative_path(path) for target in TARGETS for path in target.list_modules()}
    unknown_modules = sorted(set(chosen_modules) - known_modules)
    if unknown_modules:
        raise SystemExit(
            f"modules {', '.join(unknown_modules)} are not in targets.py; "
            f"known: {', '.join(sorted(known_modules))}"
        )


def _relative_path(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _run_target(
    target: Target, chosen_modules: Sequence[str], results: Results, args: argparse.Namespace
) -> list[ModuleRow]:
    """Run the mutants of ``target`` that have no valid result. Return a table row per module."""
    module_files = [
        path
        for path in target.list_modules()
        if not chosen_modules or _relative_path(path) in chosen_modules
    ]
    if not module_files:
        return []
    mutants_by_module = {_relative_path(path): make_mutants(path, ROOT) for path in module_files}
    all_mutants = [
        mutant for module_mutants in mutants_by_module.values() for mutant in module_mutants
    ]
    tests_hash = outcomes.hash_tests(target)
    pending_mutants = all_mutants if args.fresh else results.select_pending(all_mutants, tests_hash)
    if pending_mutants and not args.report:
        _log_line(f"{target.name}: {len(pending_mutants)} of {len(all_mutants)} mutants to run")
        _run_mutants(
            target, pending_mutants, _Progress(results, pending_mutants, tests_hash), args.workers
        )
        # Read the results again: child processes wrote most of them.
        results = Results()
    return [
        outcomes.count_outcomes(module, module_mutants, results)
        for module, module_mutants in mutants_by_module.items()
    ]


def _run_mutants(
    target: Target, pending_mutants: list[Mutant], progress: "_Progress", num_workers: int
) -> None:
    import_mutants = [mutant for mutant in pending_mutants if mutant.at_import]
    function_mutants = [mutant for mutant in pending_mutants if not mutant.at_import]
    run_in_child = partial(
        _run_in_warm_process, target, function_mutants, pending_mutants, progress, num_workers
    )
    trace = run_one_job(target.name, run_in_child, DAY_S)
    progress.count = len(function_mutants)
    for mutant_result in run_import_mutants(import_mutants, trace, num_workers):
        progress.record_result(mutant_result)


def _run_in_warm_process(
    target: Target,
    function_mutants: list[Mutant],
    pending_mutants: list[Mutant],
    progress: "_Progress",
    num_workers: int,
) -> Trace:
    """Collect and trace the tests, and run the mutants of functions."""
    traces: list[Trace] = []

    def trace_and_run(collected_tests: CollectedTests) -> None:
        module_names = sorted({mutant.module for mutant in pending_mutants})
        trace = trace_tests(collected_tests, module_names)
        if trace.failed:
            raise RuntimeError(
                f"tests fail without any mutant: {', '.join(trace.failed)}; fix them first"
            )
        _log_line(
            f"{target.name}: {len(trace.seconds)} tests in {sum(trace.seconds.values()):.0f} s"
        )
        traces.append(trace)
        for result in run_function_mutants(collected_tests, function_mutants, trace, num_workers):
            progress.record_result(result)

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
        self._mutants_by_key = {mutant.stable_key: mutant for mutant in pending}
        self._start_time_s = time.monotonic()

    def record_result(self, fork_result: ForkResult[Outcome]) -> None:
        """Write one result to the results file, and log mutants that were not killed."""
        self.count += 1
        if fork_result.answer is not None:
            fate, failed_test = fork_result.answer
        else:
            fate = "timeout" if fork_result.timed_out else "died"
            failed_test = ""
        seconds = round(fork_result.seconds, 2)
        self._results.add(
            MutantResult(fork_result.name, fate, failed_test, self._tests_hash, seconds)
        )
        mutant = self._mutants_by_key[fork_result.name]
        if fate != "killed":
            _log_line(
                f"  {fate}: {mutant.module}:{mutant.lines[0]} {outcomes.format_change(mutant)}"
            )
        if self.count % 100 == 0 or self.count == len(self._mutants_by_key):
            seconds = time.monotonic() - self._start_time_s
            _log_line(
                f"  {self.count} of {len(self._mutants_by_key)}, {seconds / self.count:.2f} s each"
            )


def _write_report(rows: Sequence[ModuleRow], *, has_all_modules: bool) -> int:
    accepted_mutants = outcomes.read_accepted_mutants()
    page = outcomes.format_page(rows, accepted_mutants)
    num_not_run = sum(row.unknown for row in rows)
    if has_all_modules and not num_not_run:
        outcomes.PAGE.write_text(page)
    else:
        sys.stdout.write(page)
    num_mutants = sum(row.mutants for row in rows)
    num_killed = sum(row.killed for row in rows)
    survivors = [mutant for row in rows for mutant in row.survivors]
    num_unexplained = sum(
        not outcomes.is_accepted(mutant, accepted_mutants) for mutant in survivors
    )
    _log_line(
        f"{num_killed} of {num_mutants} killed, {num_not_run} not run, "
        f"{num_unexplained} survivors without a reason"
    )
    return int(
        num_not_run > 0 or num_unexplained > 0 or num_killed < REQUIRED_KILL_SHARE * num_mutants
    )


def _log_line(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
