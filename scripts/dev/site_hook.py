"""Hook of mkdocs: adds pages outside of ``docs/``, and simplifies the first line of code blocks.

Some code blocks have further words after their language, which the tests of the docs read. mkdocs
cannot parse these words.
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
# Paths of the pages outside of docs/ in the repository.
OUTSIDE_PAGES = (
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
    "experiments/README.md",
    "experiments/audits.md",
    "scripts/dev/closed_faults.md",
    "scripts/dev/mutants/results.md",
)
CODE_BLOCK_START = re.compile(r"^```(\w+) .+$", re.MULTILINE)
MARKDOWN_LINK = re.compile(r"\]\((?!https?:|#)([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages outside of ``docs/``, such as CONTRIBUTING.md, to the site."""
    for name in OUTSIDE_PAGES:
        # Include the pages even if a pattern of ``exclude_docs`` matches their paths.
        inclusion = InclusionLevel.INCLUDED
        page = File.generated(config, name, abs_src_path=str(ROOT / name), inclusion=inclusion)
        page.dest_uri = f"repository/{Path(name).with_suffix('').as_posix().lower()}/index.html"
        files.append(page)
    return files


def on_page_markdown(markdown: str, page: Any, **_rest: Any) -> str:
    """Return ``markdown`` with links to paths of the site, and code blocks without extra words."""
    source_page = page.file.src_uri
    return CODE_BLOCK_START.sub(
        r"```\1", MARKDOWN_LINK.sub(lambda link: _rewrite_link(source_page, link), markdown)
    )


def _rewrite_link(source_page: str, link: re.Match[str]) -> str:
    """Return a link of ``source_page``, rewritten from a repository path to a site path."""
    source_folder = posixpath.dirname(
        source_page if source_page in OUTSIDE_PAGES else f"docs/{source_page}"
    )
    target_path = posixpath.normpath(posixpath.join(source_folder, link[1])).removeprefix("docs/")
    relative_link = posixpath.relpath(target_path, posixpath.dirname(source_page) or ".")
    return f"]({relative_link}{link[2] or ''})"
