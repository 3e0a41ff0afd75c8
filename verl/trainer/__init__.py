"""Trainers (PPO, supervised), their command lines and entry points."""

from pathlib import Path

import verl

_ROOT = Path(__file__).resolve().parents[1]
# Another package ``verl`` earlier on the search path would fail later, at the import of a name that
# it lacks: an editable installation finds the sub-packages that the other package does not have.
if _ROOT not in [Path(path).resolve() for path in verl.__path__]:
    raise ImportError(
        f"the package verl is imported from {list(verl.__path__)}; allowed: {_ROOT}, to which "
        "verl.trainer belongs; fix: remove the other package from PYTHONPATH"
    )
