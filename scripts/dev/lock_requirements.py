"""Write complete lists of pinned packages for ``pip install --no-deps``.

A list has the direct requirements of a ``.in`` file and all packages that they need.

    python scripts/dev/lock_requirements.py [--check]        cpu.in -> cpu.txt, as installed here
    python scripts/dev/lock_requirements.py --report FILE    gpu.in -> gpu.txt, as pip resolved them
    python scripts/dev/lock_requirements.py --report FILE --list docs    docs.in -> docs.txt

The first form reads the metadata of the running interpreter, which must have all packages
installed. The other forms read the report of a dry run of pip, so they need no GPU. Before the dry
run, remove the two source distributions from gpu.in. If pip finds a CPU build of torch, pin torch
with ``===``:

    pip install --dry-run --ignore-installed --report FILE -r requirements/gpu.in

Packages in EXCLUDED, and packages that only they need, are not in the lists. ``--check`` writes
nothing and exits with 1 when cpu.txt differs.
"""

import argparse
import fnmatch
import importlib.metadata
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FOLDER = Path(__file__).resolve().parents[2] / "requirements"

# Dependencies of packages that RLVCR does not use: patterns of canonical names, with the reason.
EXCLUDED = {
    "llama-cpp-python": "compiles for minutes; the GGUF file is read by transformers",
    "llm": "the command-line tool around that file",
    "spacy": "jericho loads it for interactive fiction only",
    "anthropic": "a server front end of the engine",
    "model-hosting-container-standards": "a server front end of the engine",
    "fastapi-cli": "a server front end of the engine",
    "fastapi-cloud-cli": "a server front end of the engine",
    "sentry-sdk": "a server front end of the engine",
    "email-validator": "a server front end of the engine",
}
EXCLUDED_ON_CPU = {
    "torchvision": "its CUDA build makes transformers fail with the CPU build of torch",
    "torchaudio": "as torchvision",
    "torchcodec": "as torchvision",
    "nvidia-*": "CUDA",
    "cuda-*": "CUDA",
    "triton": "has no CPU backend",
}

CPU_HEADER = """\
# Pinned and complete: pip install --no-deps -r requirements/cpu.txt
# (Python 3.11 to 3.13, Linux x86-64)
# Made from cpu.in by scripts/dev/lock_requirements.py, which lists the excluded packages and why.
# torch's CPU build comes from PyTorch's own CPU index where pip is not set up for it.
"""
GPU_HEADER = """\
# Pinned and complete: pip install --no-deps -r requirements/gpu.txt
# (Python 3.11 to 3.13, Linux x86-64, CUDA 13 driver)
# Made from gpu.in by scripts/dev/lock_requirements.py --report, from pip's dry run without a GPU.
"""
DOCS_HEADER = """\
# Pinned and complete: pip install --no-deps -r requirements/docs.txt
# Made from docs.in by scripts/dev/lock_requirements.py --report --list docs, from a dry run of pip.
"""
HEADERS = {"gpu": GPU_HEADER, "docs": DOCS_HEADER}


@dataclass(frozen=True)
class Package:
    """Name, version and requirements of one distribution."""

    name: str
    version: str
    requires: list[str]


def read_report(path: Path) -> dict[str, Package]:
    """Return the packages of a report of pip, by canonical name."""
    entries = [item["metadata"] for item in json.loads(path.read_text())["install"]]
    return {
        canonicalize_name(entry["name"]): Package(
            entry["name"], entry["version"], entry.get("requires_dist", [])
        )
        for entry in entries
    }


def find_package(name: str, reported_packages: Mapping[str, Package]) -> Package:
    """Return the reported package ``name``, or else the installed one."""
    key = canonicalize_name(name)
    if key in reported_packages:
        return reported_packages[key]
    installed_distribution = importlib.metadata.distribution(name)
    return Package(
        installed_distribution.metadata["Name"],
        installed_distribution.version,
        installed_distribution.requires or [],
    )


def parse_requirements(text: str) -> list[Requirement]:
    """Parse the requirements in the text of a ``.in`` file."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return [Requirement(line) for line in lines if line]


def iter_applicable_requirements(package: Package, extras: frozenset[str]) -> Iterator[Requirement]:
    """Yield the requirements of ``package`` with ``extras`` that apply to this machine."""
    for text in package.requires:
        requirement = Requirement(text)
        # A marker can be evaluated for one extra only, so try it without extra and with each extra.
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield requirement


def resolve_dependencies(
    direct_requirements: list[Requirement],
    reported_packages: Mapping[str, Package],
    excluded: Mapping[str, str],
) -> list[Package]:
    """Return all packages that ``direct_requirements`` needs, sorted by name.

    Excluded packages, and packages that only they need, are not included.
    """
    packages: dict[str, Package] = {}
    visited_keys: set[tuple[str, frozenset[str]]] = set()
    pending_requirements = list(direct_requirements)
    while pending_requirements:
        requirement = pending_requirements.pop()
        # The key contains the extras, because the same package with other extras has more needs.
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if key in visited_keys or any(fnmatch.fnmatch(key[0], pattern) for pattern in excluded):
            continue
        visited_keys.add(key)
        packages[key[0]] = find_package(requirement.name, reported_packages)
        pending_requirements += iter_applicable_requirements(packages[key[0]], key[1])
    return sorted(packages.values(), key=lambda package: package.name.lower())


def list_unmet_requirements(
    direct_requirements: list[Requirement], packages: list[Package]
) -> list[str]:
    """Return a line for each direct requirement that the pinned versions do not meet."""
    versions = {canonicalize_name(package.name): package.version for package in packages}
    pinned_requirements = [
        (requirement, versions[canonicalize_name(requirement.name)])
        for requirement in direct_requirements
    ]
    return [
        f"required: {requirement}; pinned version: {version}"
        for requirement, version in pinned_requirements
        if version not in requirement.specifier
    ]


def main() -> int:
    """Write a pinned list or, with ``--check``, compare it. Return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 when cpu.txt differs"
    )
    parser.add_argument("--report", type=Path, help="a resolver report: make a list from it")
    parser.add_argument(
        "--list", choices=tuple(HEADERS), default="gpu", help="the list that the report is for"
    )
    args = parser.parse_args()
    if args.report:
        name = args.list
        header = HEADERS[name]
        excluded = EXCLUDED
        reported_packages = read_report(args.report)
    else:
        name = "cpu"
        header = CPU_HEADER
        excluded = EXCLUDED | EXCLUDED_ON_CPU
        reported_packages = {}
    direct_requirements = parse_requirements((FOLDER / f"{name}.in").read_text())
    packages = resolve_dependencies(direct_requirements, reported_packages, excluded)
    unmet_lines = list_unmet_requirements(direct_requirements, packages)
    if unmet_lines:
        sys.stderr.write("\n".join(unmet_lines) + "\n")
        return 1
    text = header + "".join(f"{package.name}=={package.version}\n" for package in packages)
    list_path = FOLDER / f"{name}.txt"
    if args.check:
        return 0 if list_path.read_text() == text else 1
    list_path.write_text(text)
    sys.stdout.write(f"{len(packages)} packages in {list_path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
