"""Hook of mkdocs: adds pages outside of ``docs/``, and simplifies the first line of code blocks.

Some code blocks have further words after their language, which tests read and mkdocs cannot.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig  # pyright: ignore[reportMissingImports]
from mkdocs.structure.files import (  # pyright: ignore[reportMissingImports]
    File,
    Files,
    InclusionLevel,
)

ROOT = Path(__file__).resolve().parents[2]
# Pages outside of docs/, as paths in the repository; in the site they have the same paths.
OUTSIDE = (
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
    "experiments/README.md",
    "scripts/dev/closed_faults.md",
    "scripts/dev/mutants/results.md",
)
MARKED = re.compile(r"^```(\w+) .+$", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:|#)([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of ``OUTSIDE`` to the site."""
    for name in OUTSIDE:
        # Include the pages explicitly: by default mkdocs skips paths that begin with a dot.
        included = InclusionLevel.INCLUDED
        page = File.generated(config, name, abs_src_path=str(ROOT / name), inclusion=included)
        page.dest_uri = f"repository/{Path(name).with_suffix('').as_posix().lower()}/index.html"
        files.append(page)
    return files


def on_page_markdown(markdown: str, page: Any, **_rest: Any) -> str:
    """Return ``markdown`` with paths of the site in links, and only the language at code blocks."""
    source = page.file.src_uri
    return MARKED.sub(r"```\1", LINK.sub(lambda link: _site_link(source, link), markdown))


def _site_link(source: str, link: re.Match[str]) -> str:
    """Return the link of the page ``source`` with its target as a path in the site."""
    folder = posixpath.dirname(source if source in OUTSIDE else f"docs/{source}")
    target_path = posixpath.normpath(posixpath.join(folder, link[1])).removeprefix("docs/")
    relative = posixpath.relpath(target_path, posixpath.dirname(source) or ".")
    return f"]({relative}{link[2] or ''})"
