"""A config as YAML text that Hydra reads back as the same values."""

from collections.abc import Mapping
from typing import Any

import yaml

# libyaml writes ten times as fast as Python, which shows in the time that --cfg job takes.
_Base: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Dumper(_Base):
    """Quotes text that some readers of YAML take for something else: 1e-6 for a number, n for
    no.
    """


def _write_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    quoted = text.lower() in ("y", "n") or _is_number(text)
    style = "'" if quoted else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _is_number(text: str) -> bool:
    try:
        # float() takes more for a number than YAML 1.1 does: better quoted once too often.
        float(text)
    except ValueError:
        return False
    return True


_Dumper.add_representer(str, _write_text)


def yaml_text(tree: Mapping[str, Any]) -> str:
    """``tree`` as YAML, in the order of its keys."""
    return yaml.dump(
        dict(tree), Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False
    )
