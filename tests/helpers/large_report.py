"""Measure the size and the opening time of a report with many invented trajectories.

``python -m tests.helpers.large_report RUN_DIR [--trajectories 10000]``

The command writes the run and its report, and opens the report in a headless Chromium, each time in
a new page. It prints the times that the page measured from the start of loading to the first
visible trajectory.
"""

import argparse
import random
import statistics
import time
from pathlib import Path

from tests.helpers.browser import DESKTOP, PHONE, Browser, find_browser
from tests.helpers.fake_run import fake_run, token_numbers, trajectories
from verl.record.report import write_report
from verl.record.run_dir import RunDirectory

GROUPS, MEMBERS = 16, 8  # per training step
OPENINGS = 5
ALL = "step.value = 'all'; step.dispatchEvent(new Event('change'))"
LAST = "document.querySelector('#list li:last-child button').click()"


def make_run(path: Path, num_trajectories: int) -> Path:
    """Write a run directory with at least ``num_trajectories`` training trajectories."""
    draw = random.Random(0)
    steps = -(-num_trajectories // (GROUPS * MEMBERS))
    run = RunDirectory(fake_run(path, steps=steps, validate_every=steps + 1, rollouts=False))
    for step in range(1, steps + 1):
        rows = list(trajectories(step, GROUPS, MEMBERS, 0.4 + 0.3 * step / steps, draw))
        run.write_tokens(step, [token_numbers(row, draw) for row in rows])
        run.write_rollouts(step, rows)
    return path


def opened(browser: Browser, address: str, size: tuple[int, int]) -> float:
    """Return milliseconds until the first trajectory is visible, by the clock of the page."""
    browser.show(address, size)
    return float(browser.evaluate("document.documentElement.dataset.ready.split(' ')[0]"))


def took(browser: Browser, action: str, condition: str) -> float:
    """Return milliseconds from ``action`` until ``condition`` holds in the page."""
    return browser.evaluate(
        "new Promise((done) => { const start = performance.now();"
        f"{action};"
        f"const look = () => {condition} ? done(performance.now() - start)"
        " : requestAnimationFrame(look); look(); })"
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Size and opening time of a large report.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--trajectories", type=int, default=10_000)
    arguments = parser.parse_args()
    run_dir = make_run(arguments.run_dir, arguments.trajectories)
    start = time.perf_counter()
    report = write_report(run_dir)
    written = time.perf_counter() - start
    raw = sum(file.stat().st_size for file in (run_dir / "rollouts").iterdir())
    tokens = sum(file.stat().st_size for file in (run_dir / "tokens").iterdir())
    print(f"rollouts {raw / 1e6:.1f} MB, tokens {tokens / 1e6:.1f} MB")
    print(f"report.html {report.stat().st_size / 1e6:.2f} MB, written in {written:.1f} s")
    with Browser(find_browser() or "chromium") as browser:
        for name, size in (("desktop", DESKTOP), ("phone", PHONE)):
            times = [opened(browser, report.as_uri(), size) for _ in range(OPENINGS)]
            print(f"{name}: open in {statistics.median(times):.0f} ms (most {max(times):.0f})")
        count = took(browser, ALL, "document.querySelectorAll('button.play').length > 0")
        print(browser.evaluate("document.getElementById('count').textContent"))
        shown = "document.querySelector('#list li:last-child button').ariaCurrent === 'true'"
        print(
            f"list of all trajectories: {count:.0f} ms; "
            f"one of them: {took(browser, LAST, shown):.0f} ms"
        )


if __name__ == "__main__":
    main()
