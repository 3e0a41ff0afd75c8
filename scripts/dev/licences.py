"""Write ``docs/reference/licences.md``: packages of ``requirements/cpu.txt`` with their licences.

    python scripts/dev/licences.py

Reads the metadata of the running interpreter, without network access.
"""

import importlib.metadata
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PINNED_PACKAGE = re.compile(r"^([\w.-]+)===?(\S+)", re.MULTILINE)
MAX_LICENCE_LENGTH = 60  # characters; some packages store the full text of their licence
PAGE_HEAD = """# Licences of the dependencies

What `requirements/cpu.txt` installs, as the packages themselves say.
`python scripts/dev/licences.py` writes this page. RLVCR itself is under the Apache License 2.0
(`LICENSE`).

| package | version | licence |
|---|---|---|
"""


def get_licence(package: str) -> str:
    """Return the licence of ``package`` by its metadata; "" if it is not installed."""
    try:
        # The type stub does not declare the mapping methods of the metadata.
        metadata: Any = importlib.metadata.metadata(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
    expression = metadata.get("License-Expression")
    classifier_licences = [
        line.rpartition(" :: ")[2]
        for line in metadata.get_all("Classifier") or []
        if line.startswith("License :: ")
    ]
    licence_text = (metadata.get("License") or "").strip().partition("\n")[0][:MAX_LICENCE_LENGTH]
    return expression or ", ".join(classifier_licences) or licence_text or "not stated"


def format_licences_page(requirements_text: str) -> str:
    """Return the page with all packages that ``requirements_text`` pins."""
    rows = [
        f"| {name} | {version} | {get_licence(name) or 'not installed here'} |"
        for name, version in PINNED_PACKAGE.findall(requirements_text)
    ]
    return PAGE_HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    requirements_text = (ROOT / "requirements" / "cpu.txt").read_text()
    (ROOT / "docs" / "reference" / "licences.md").write_text(
        format_licences_page(requirements_text)
    )
