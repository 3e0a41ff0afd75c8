"""A config as YAML text that Hydra reads back as the same values."""

from collections.abc import Mapping
from typing import Any

import yaml

# libyaml is ten times as fast as the Python dumper, which shortens --cfg job noticeably.
_Base: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Dumper(_Base):
    """YAML dumper that quotes strings which some parsers convert: 1e-6 to a number, n to False."""


def _write_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    quoted = text.lower() in ("y", "n") or _is_number(text)
    style = "'" if quoted else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _is_number(text: str) -> bool:
    try:
        # float() accepts more texts than YAML 1.1; quoting too much does no harm.
        float(text)
    except ValueError:
        return False
    return True


_Dumper.add_representer(str, _write_text)


def yaml_text(tree: Mapping[str, Any]) -> str:
    """Return ``tree`` as YAML, in the order of its keys."""
    return yaml.dump(
        dict(tree), Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False
    )
