"""``python -m verl.record.report RUN_DIR`` writes ``report.html`` into the run directory; of
several runs it writes one page; with ``--serve`` it shows a run that is under way.
"""

import argparse
import sys
from pathlib import Path

from verl.record.report.page import write_comparison, write_report
from verl.record.report.serve import PORT, LiveServer
from verl.utils.commands import UsageError, run_reporting_mistakes
from verl.utils.proxies import is_loopback


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m verl.record.report",
        description="Write report.html of a run, or one page that compares several.",
    )
    parser.add_argument(
        "run_dir", nargs="+", help="run directory, for example runs/rlvcr/quickstart"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="where the page of several runs goes; by default comparison.html in the nearest "
        "folder that they share",
    )
    parser.add_argument(
        "--serve",
        action="store_true",
        help="show the run while it goes on, at an address of this machine; writes nothing",
    )
    parser.add_argument("--port", type=int, default=PORT, help="of --serve; 0 takes a free one")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address that --serve listens on; at another one than this machine's own whoever "
        "learns of the key reads all plays, for nothing is encrypted",
    )
    words = parser.parse_args()
    several = len(words.run_dir) > 1
    if words.out is not None and not several:
        parser.error("--out is for several runs: the report of one is in its directory")
    if words.serve and several:
        parser.error("--serve shows one run")
    if words.serve:
        serve(words.run_dir[0], words.host, words.port)
    elif several:
        print(write_comparison(words.run_dir, words.out))
    else:
        print(write_report(words.run_dir[0]))


def serve(run_dir: str, host: str, port: int) -> None:
    """Answer until the keyboard interrupts."""
    if not 0 <= port <= 65535:
        raise UsageError(f"--port={port}; allowed: 0 to 65535; fix: --port 0 takes a free one")
    with _listening(run_dir, host, port) as server:
        if not is_loopback(host):
            print(f"{host} can be reached from elsewhere: the key below is all that protects plays")
        print(server.address, flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("ended")


def _listening(run_dir: str, host: str, port: int) -> LiveServer:
    try:
        return LiveServer(run_dir, host, port)
    except FileNotFoundError:
        raise
    except OSError as error:
        address = f"--host={host} --port={port}"
        fix = "--host 127.0.0.1 --port 0"
        raise UsageError(
            f"{address}: {error.strerror}; allowed: an address of this machine and "
            f"a port that is free; fix: {fix}"
        ) from error


if __name__ == "__main__":
    sys.exit(run_reporting_mistakes(main))
