"""Command line of the report: ``python -m verl.record.report RUN_DIR`` writes ``report.html``.

Several run directories give one page that compares them. ``--serve`` shows a run in progress.
"""

import argparse
import sys
from pathlib import Path

from verl.record.report.page import write_comparison, write_report
from verl.record.report.serve import PORT, LiveServer
from verl.utils.commands import UsageError, run_and_report_mistakes
from verl.utils.proxies import is_loopback


def main() -> None:
    """Parse the arguments and write or serve the report."""
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
        help="path of the page of several runs; default: comparison.html in their nearest "
        "common folder",
    )
    parser.add_argument(
        "--serve",
        action="store_true",
        help="serve the report of a running job at an address of this machine; writes nothing",
    )
    parser.add_argument("--port", type=int, default=PORT, help="port of --serve; 0: a free one")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address that --serve listens on; the connection is not encrypted, so at an address "
        "that others can reach, everyone who learns the key can read all trajectories",
    )
    args = parser.parse_args()
    has_several_runs = len(args.run_dir) > 1
    if args.out is not None and not has_several_runs:
        parser.error("--out needs several runs: the report of one run is in its directory")
    if args.serve and has_several_runs:
        parser.error("--serve takes one run")
    if args.serve:
        serve_run(args.run_dir[0], args.host, args.port)
    elif has_several_runs:
        print(write_comparison(args.run_dir, args.out))
    else:
        print(write_report(args.run_dir[0]))


def serve_run(run_dir: str, host: str, port: int) -> None:
    """Print the address of the report and serve it until Ctrl-C."""
    if not 0 <= port <= 65535:
        message = f"--port={port}; allowed: 0 to 65535; fix: --port 0 takes a free one"
        raise UsageError(message, "out_of_range")
    try:
        server = LiveServer(run_dir, host, port)
    except FileNotFoundError:
        raise
    except (OSError, UnicodeError) as error:  # UnicodeError: the host name is invalid
        why = getattr(error, "strerror", None) or error
        raise UsageError(
            f"--host={host} --port={port}: {why}; allowed: an address of this machine and a port "
            "that is free; fix: --host 127.0.0.1 --port 0",
            "failed_call",
        ) from error
    with server:
        if not is_loopback(host):
            print(f"{host} can be reached from other machines: only the key protects the data")
        print(server.page_url, flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("ended")


if __name__ == "__main__":
    sys.exit(run_and_report_mistakes(main))
