"""Agents that act in environments: environments, tokens, memory and the trajectory collector."""

from pathlib import Path

import verl

_ROOT = Path(__file__).resolve().parents[1]
# Another package ``verl`` would fail later, at the import of a name that it lacks.
if _ROOT / "verl" not in [Path(path).resolve() for path in verl.__path__]:
    raise ImportError(
        f"the package verl is imported from {list(verl.__path__)}; allowed: {_ROOT / 'verl'}, to "
        "which agent_system belongs; fix: remove the other package from PYTHONPATH"
    )
