"""Masking of secrets in settings and command lines before these are written or shown."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MASK = "***"
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SECRET_NAME_PARTS = {"secret", "secrets", "password", "passwd", "passphrase", "credential"}
_SECRET_NAME_PARTS |= {"credentials", "apikey"}
_KEYS = {"api", "access", "private", "secret", "auth", "account", "service", "encryption"}
_SPECIAL_TOKENS = {"pad", "eos", "bos", "unk", "sep", "cls", "mask", "image", "end", "start"}
_IN_URL = re.compile(r"(://[^/\s:@]*):[^/\s@]+@")
_PAIR = re.compile(r"""(['"]?([A-Za-z_]\w*)['"]?\s*[:=]\s*)(['"]?)([^\s,{}\[\]'"]+)\3""")
_MIN_HIDDEN = 8  # minimum characters of a masked value: a shorter one may be an ordinary word
_hidden: set[str] = set()
_ENVIRONMENTS = ("runtime_env", "env_vars", "mcp_servers")


def is_secret_name(name: str) -> bool:
    """Return True if a key of this name holds a secret.

    Examples: API_KEY, hf_token, dbPassword; not prompt_key, tokenizer, max_tokens or pad_token.
    """
    name_words = [name_word.lower() for name_word in _PART.findall(name)]
    if not name_words or _SECRET_NAME_PARTS & set(name_words):
        return bool(name_words)
    preceding_word = name_words[-2] if len(name_words) > 1 else ""
    if name_words[-1] == "token":
        return preceding_word not in _SPECIAL_TOKENS
    # Names of environment variables are upper-case, names of data columns are not.
    return "key" in name_words and (preceding_word in _KEYS or name.isupper())


def mask_secrets(value: Any, secret: bool = False) -> Any:
    """Return ``value`` with its secrets masked.

    Masked are texts under secret names, environment variables of processes, and passwords in URLs.
    Interpolations (``${...}``) are not changed.
    """
    if isinstance(value, Mapping):
        return {
            name: mask_secrets(
                item, secret or is_secret_name(str(name)) or _is_environment(name, value)
            )
            for name, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [mask_secrets(item, secret) for item in value]
    if isinstance(value, str):
        if secret and value and not value.startswith("${"):
            return MASK
        return _IN_URL.sub(rf"\1:{MASK}@", value)
    return value


def _is_environment(name: object, siblings: Mapping[Any, Any]) -> bool:
    """Return True if ``name``, next to the keys ``siblings``, holds environment variables."""
    return name == "env_vars" or (name == "env" and "command" in siblings)


def mask_arguments(words: Sequence[str]) -> list[str]:
    """Return the arguments of a command line with their secrets masked."""
    return [_mask_argument(str(word)) for word in words]


def _mask_argument(word: str) -> str:
    key, equals, value = word.partition("=")
    if equals and any(key_name in _ENVIRONMENTS for key_name in key.lstrip("+").split(".")):
        return word if value.startswith("${") else f"{key}={MASK}"
    return mask_text(word)


def register_secrets(values: Mapping[str, Any]) -> None:
    """Make ``mask_text`` mask the secrets in ``values``: errors quote them without their names."""
    _hidden.update(_iterate_secrets(values))


def _iterate_secrets(value: Any, secret: bool = False) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _iterate_secrets(item, secret or is_secret_name(str(name)))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _iterate_secrets(item, secret)
    # The path of a file with a secret, or a reference to a variable, is not itself secret.
    elif isinstance(value, str) and secret and not value.startswith(("/", "${", "~")):
        yield from [value] if len(value) >= _MIN_HIDDEN else []


def mask_text(text: str) -> str:
    """Return ``text`` without secrets: ``API_KEY=...``, passwords in URLs, registered values."""

    def mask_pair(match: re.Match[str]) -> str:
        is_unmasked = not is_secret_name(match[2]) or match[4].startswith("$")
        return match[0] if is_unmasked else f"{match[1]}{MASK}"

    text = _PAIR.sub(mask_pair, _IN_URL.sub(rf"\1:{MASK}@", text))
    for value in sorted(_hidden, key=len, reverse=True):
        text = text.replace(value, MASK)
    return text
