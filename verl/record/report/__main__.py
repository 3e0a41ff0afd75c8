"""``python -m verl.record.report RUN_DIR`` writes ``report.html`` into the run directory; of
several runs it writes one page; with ``--serve`` it shows a run that is under way.
"""

import argparse
from pathlib import Path

from verl.record.report.page import write_comparison, write_report
from verl.record.report.serve import PORT, LiveServer, is_local


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
    with LiveServer(run_dir, host, port) as server:
        if not is_local(host):
            print(f"{host} can be reached from elsewhere: the key below is all that protects plays")
        print(server.address, flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("ended")


if __name__ == "__main__":
    main()
