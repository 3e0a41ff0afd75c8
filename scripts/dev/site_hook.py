"""What mkdocs is told besides ``mkdocs.yml``: pages beside ``docs/``, and the marks of blocks that
tests run.
"""

import re
from pathlib import Path
from typing import Any

# Of requirements/docs.txt, which the checks do without.
from mkdocs.config.defaults import MkDocsConfig  # pyright: ignore[reportMissingImports]
from mkdocs.structure.files import (  # pyright: ignore[reportMissingImports]
    File,
    Files,
    InclusionLevel,
)

ROOT = Path(__file__).resolve().parents[2]
BESIDE = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
MARKED = re.compile(r"^```(\w+) .+$", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of ``BESIDE``, so that a link to ``../NAME.md`` leads to the page NAME."""
    for name in BESIDE:
        source = str(ROOT / name)
        # Said here: by its default mkdocs leaves out paths that begin with a dot.
        shown = InclusionLevel.INCLUDED
        page = File.generated(config, f"../{name}", abs_src_path=source, inclusion=shown)
        page.dest_uri = f"{Path(name).stem.lower()}/index.html"
        files.append(page)
    return files


def on_page_markdown(markdown: str, **_page: Any) -> str:
    """A block knows its language alone: what stands behind it is for tests, and Markdown's own
    grammar takes such a fence for text.
    """
    return MARKED.sub(r"```\1", markdown)
