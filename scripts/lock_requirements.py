"""Pin the closure of ``requirements/cpu.in`` as it is installed here into ``requirements/cpu.txt``.

    python scripts/lock_requirements.py [--check]

Reads the metadata of the interpreter it runs in, so run it in an environment that has everything. The list is installed
with ``pip install --no-deps``: it must be complete, and it must not hold what LEAVE_OUT names. ``--check`` writes nothing
and exits with 1 when the file differs.
"""

import argparse
import fnmatch
import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FOLDER = Path(__file__).resolve().parents[1] / "requirements"

# Asked for by some package, used by nothing here. Patterns over canonical names, each with its reason.
LEAVE_OUT = {
    "torchvision": "its CUDA build breaks transformers beside the CPU torch",
    "torchaudio": "as torchvision",
    "torchcodec": "as torchvision",
    "nvidia-*": "CUDA",
    "cuda-*": "CUDA",
    "triton": "has no CPU backend",
    "llama-cpp-python": "compiles for minutes; the GGUF file is read by transformers",
    "llm": "the command-line tool around that file",
    "spacy": "jericho loads it for interactive fiction only",
    "anthropic": "a server front end of the engine",
    "mcp": "a server front end of the engine",
    "model-hosting-container-standards": "a server front end of the engine",
    "fastapi-cli": "a server front end of the engine",
    "fastapi-cloud-cli": "a server front end of the engine",
    "sentry-sdk": "a server front end of the engine",
    "email-validator": "a server front end of the engine",
}

HEADER = """\
# Pinned and complete: pip install --no-deps -r requirements/cpu.txt   (Python 3.11, Linux x86-64)
# Made from cpu.in by scripts/lock_requirements.py, which also says what is left out and why.
# torch's CPU build comes from PyTorch's own CPU index where pip is not set up for it.
"""


def is_left_out(name: str) -> bool:
    """Whether LEAVE_OUT names the distribution."""
    return any(fnmatch.fnmatch(canonicalize_name(name), pattern) for pattern in LEAVE_OUT)


def direct_requirements(text: str) -> list[Requirement]:
    """The requirements in the text of a ``.in`` file."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return [Requirement(line) for line in lines if line]


def dependencies(name: str, extras: frozenset[str]) -> Iterator[Requirement]:
    """What the installed distribution asks for on this machine, with ``extras``."""
    for text in importlib.metadata.requires(name) or []:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield requirement


def closure(direct: list[Requirement]) -> dict[str, str]:
    """Installed versions by name of everything ``direct`` needs, LEAVE_OUT and what only it needs not included.

    Raises ``PackageNotFoundError`` for one that is not installed.
    """
    pins: dict[str, str] = {}
    visited: set[tuple[str, frozenset[str]]] = set()
    waiting = list(direct)
    while waiting:
        requirement = waiting.pop()
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if key in visited or is_left_out(requirement.name):
            continue
        visited.add(key)
        distribution = importlib.metadata.distribution(requirement.name)
        pins[distribution.metadata["Name"]] = distribution.version
        waiting += dependencies(requirement.name, key[1])
    return pins


def mismatches(direct: list[Requirement], pins: dict[str, str]) -> list[str]:
    """Direct requirements whose pin is not the version that is installed here."""
    versions = {canonicalize_name(name): version for name, version in pins.items()}
    installed = ((item, versions[canonicalize_name(item.name)]) for item in direct)
    return [f"{item} asked for, {version} installed" for item, version in installed if version not in item.specifier]


def main() -> int:
    """Write (or compare) the pinned list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when cpu.txt differs")
    args = parser.parse_args()
    direct = direct_requirements((FOLDER / "cpu.in").read_text())
    pins = closure(direct)
    wrong = mismatches(direct, pins)
    if wrong:
        sys.stderr.write("\n".join(wrong) + "\n")
        return 1
    text = HEADER + "".join(f"{name}=={pins[name]}\n" for name in sorted(pins, key=str.lower))
    target = FOLDER / "cpu.txt"
    if args.check:
        return 0 if target.read_text() == text else 1
    target.write_text(text)
    sys.stdout.write(f"{len(pins)} packages in {target}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
