"""Values of a model's ``config.json``, replaced by those of ``override_config``.

The trainer, the rollout engines and ``--check`` use this module, so that all build the same model.
It imports no torch, because an engine sets its devices before torch is loaded.
"""

import copy
from collections.abc import Mapping
from typing import Any


def replace_config_values(values: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a ``config.json``, replaced by those of ``override``.

    If the file has ``rope_parameters``, ``rope_theta`` and ``rope_scaling`` are stored in them.
    transformers would ignore a separate ``rope_theta``, and a separate ``rope_scaling`` would reset
    the base.
    """
    override = copy.deepcopy(dict(override))  # transformers adds values to the dicts that it gets
    new_values = {**values, **override}
    rope = new_values.get("rope_parameters") or {}
    if "rope_theta" in rope and not override.keys().isdisjoint(("rope_theta", "rope_scaling")):
        scaling = override.get("rope_scaling", rope) or {"rope_type": "default"}
        new_values["rope_parameters"] = {"rope_theta": rope["rope_theta"], **scaling}
        if "rope_theta" in override:
            new_values["rope_parameters"]["rope_theta"] = override["rope_theta"]
        new_values.pop("rope_scaling", None)
    return new_values
