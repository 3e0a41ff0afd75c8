"""Write ``docs/reference/licences.md``: packages of ``requirements/cpu.txt`` with their licences.

    python scripts/dev/licences.py

Reads the metadata of the running interpreter, without network access.
"""

import importlib.metadata
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PINNED = re.compile(r"^([\w.-]+)===?(\S+)", re.MULTILINE)
CLASSIFIER = "License :: "
LONGEST = 60  # characters; some packages give the full text of their licence
HEAD = """# Licences of the dependencies

What `requirements/cpu.txt` installs, as the packages themselves say.
`python scripts/dev/licences.py` writes this page. RLVCR itself is under the Apache License 2.0
(`LICENSE`).

| package | version | licence |
|---|---|---|
"""


def licence_of(package: str) -> str:
    """Return the licence of ``package`` by its metadata; "" if it is not installed.

    Order: licence expression, classifiers, free text.
    """
    try:
        # The type stub does not declare the mapping methods of the metadata.
        metadata: Any = importlib.metadata.metadata(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
    expression = metadata.get("License-Expression")
    classifiers = [
        line for line in metadata.get_all("Classifier") or [] if line.startswith(CLASSIFIER)
    ]
    names = [line.rpartition(" :: ")[2] for line in classifiers]
    licence_text = (metadata.get("License") or "").strip().partition("\n")[0][:LONGEST]
    return expression or ", ".join(names) or licence_text or "not stated"


def licences_page(pinned: str) -> str:
    """Return the page of the packages that the text of a requirements file pins."""
    rows = [
        f"| {name} | {version} | {licence_of(name) or 'not installed here'} |"
        for name, version in PINNED.findall(pinned)
    ]
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    pins = (ROOT / "requirements" / "cpu.txt").read_text()
    (ROOT / "docs" / "reference" / "licences.md").write_text(licences_page(pins))
