"""What a key means in one configuration: its value, and for amounts what they come to in tasks,
trajectories, rows, tokens and optimizer steps.
"""

from verl.config.amounts import MEANINGS
from verl.config.plugged import schema_keys
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.settings import ConfigError, Key, MissingKey, lookup
from verl.config.settings.unknown import meaning, nearest


def explain(cfg: PPOConfig | SFTConfig, path: str) -> str:
    """The text about the key at dotted ``path``. Raises ``ConfigError`` for an unknown key."""
    keys = schema_keys(type(cfg))
    key = keys.get(path)
    if key is None:
        guess = meaning(path) or nearest(path, keys)
        fix = f"--explain {guess}" if guess else "--help lists the sections"
        raise ConfigError(f"--explain {path}: unknown key; allowed: any key; fix: {fix}")
    if key.is_section:
        raise ConfigError(f"--explain {path}: a section; allowed: a key; fix: --help {path}")
    try:
        value = lookup(cfg, path)
    except MissingKey:
        return f"{path}: not in this configuration, which does not have its section\n  {key.doc}"
    lines = [f"{path}={value!r}", f"  {key.doc}", f"  {_allowed(key)}"]
    found = MEANINGS.get(path)
    if found is not None and isinstance(cfg, PPOConfig):
        lines += [f"  here: {line}" for line in found(cfg)]
    return "\n".join(lines)


def _allowed(key: Key) -> str:
    default = "null" if key.default is None else key.default
    if key.unused is not None:
        mark = key.unused
        return (
            f"refused: {mark.why}; instead: {mark.instead}"
            if mark.instead
            else (f"no effect: {mark.why}")
        )
    note = "; no effect on CPU" if key.gpu_only else ""
    return f"allowed: {key.allowed()}; default: {default}{note}"
