"""Agents that act in environments: environments, tokens, memory and the trajectory collector."""

from pathlib import Path

import verl

_VERL = Path(__file__).resolve().parents[1] / "verl"
# Another package ``verl`` would fail later, at the import of a name that it lacks.
if _VERL not in [Path(path).resolve() for path in verl.__path__]:
    raise ImportError(
        f"the package verl is imported from {list(verl.__path__)}; allowed: {_VERL}, to which "
        "agent_system belongs; fix: remove the other package from PYTHONPATH"
    )
