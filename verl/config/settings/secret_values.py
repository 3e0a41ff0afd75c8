"""Masking of secrets in settings and command lines before these are written or shown."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MASK = "***"
_NAME_WORD_PATTERN = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SECRET_WORDS = {"secret", "secrets", "password", "passwd", "passphrase", "credential"}
_SECRET_WORDS |= {"credentials", "apikey", "passwords", "authorization", "bearer", "pwd", "dsn"}
_SECRET_WORDS |= {"cookie", "cookies", "webhook", "jwt", "oauth"}
_SECRET_KEY_PREFIXES = {"api", "access", "private", "secret", "auth", "account", "service"}
_SECRET_KEY_PREFIXES |= {"encryption", "signing", "ssh", "pem", "license", "storage", "kaggle"}
_SECRET_KEY_PREFIXES |= {"master"}
_SPECIAL_TOKEN_NAMES = {"pad", "eos", "bos", "unk", "sep", "cls", "mask", "image", "end", "start"}
# A password may contain "@" and "/". Digits before a "/" are a port, not a password.
_URL_PASSWORD_PATTERN = re.compile(
    r"""(://[^/\s:@]*):(?!\d*/)(?:[^/\s@]+|[^\s@,'"]{1,99})(?:@[^/\s@,'"]{1,99}){,9}@"""
)
# Names have at most 100 characters. Otherwise a long word without ":" or "=" would take quadratic
# time.
# A value in quotes may contain spaces, and one of a header may begin with a scheme. In a URL, the
# text after "https:" is not a value.
_KEY_VALUE_PATTERN = re.compile(
    r"""(['"]?(?<![A-Za-z_])([A-Za-z_][\w-]{,99})['"]?\s*[:=]\s*)(?!//)"""
    r"""('[^']+'|"[^"]+"|(?:(?i:token|apikey|digest|negotiate)\s+)?[^\s,{}\[\]'"]+)"""
)
# Options of commands: --token VALUE, also as items of a list.
_OPTION_PATTERN = re.compile(
    r"""((?<![\w-])--?([A-Za-z][\w-]*)(?:\s+|['"]?\s*,\s*))(?!-)"""
    r"""('[^']+'|"[^"]+"|[^\s,{}\[\]'"]+)"""
)
# Options of commands that are followed by a password. A number after ``-p`` is a port.
_PASSWORD_OPTIONS = ("-p", "-pw", "-pass", "--pass")
# Values that are secret by their form: headers, and keys of well-known services.
_SECRET_FORM_PATTERN = re.compile(
    r"(?<=\bBearer )[\w.~+/=-]{8,}|(?<=\bBasic )[\w.~+/=-]{8,}|\bsk-[\w-]{20,}|\bhf_\w{20,}"
    r"|\bgh[pousr]_\w{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}|\bxox[abprs]-[\w-]{10,}"
    r"|\bgsk_\w{20,}|\br8_\w{20,}|\bnpm_\w{20,}|\bnvapi-[\w-]{20,}|\bpypi-[\w-]{16,}"
    r"|\bSG\.[\w-]{16,}\.[\w-]{16,}|\bya29\.[\w-]{16,}"
    r"|\bAKIA[0-9A-Z]{16}\b|\bAIza[\w-]{30,}|\beyJ[\w-]{8,4000}\.[\w-]{8,}\.[\w-]{8,}"
)
_MASKED_TEXT_PATTERN = re.compile(rf"(\S*[:=]\s?|\S+ )?{re.escape(MASK)}(@\S*)?")
# Minimum number of characters of a masked value: a shorter one may be an ordinary word.
_MIN_MASKED_LENGTH = 8
_registered_secrets: set[str] = set()
# Keys of tool servers whose texts may contain options and headers.
_KEYS_WITH_COMMANDS = ("args", "command", "env", "environment", "headers", "url")
_KEYS_WITH_ENVIRONMENT_VARIABLES = ("runtime_env", "env_vars", "mcp_servers")


def is_secret_name(name: str) -> bool:
    """Return True if a key of this name holds a secret.

    Examples: API_KEY, hf_token, dbPassword; not prompt_key, tokenizer, max_tokens or pad_token.
    """
    name_words = [name_word.lower() for name_word in _NAME_WORD_PATTERN.findall(name)]
    if not name_words or _SECRET_WORDS & set(name_words):
        return bool(name_words)
    preceding_word = name_words[-2] if len(name_words) > 1 else ""
    if name_words[-1] in ("keys", "tokens"):
        return preceding_word in _SECRET_KEY_PREFIXES
    if name_words[-1] == "token":
        return preceding_word not in _SPECIAL_TOKEN_NAMES
    if name_words[-1] == "auth" or name_words[-2:] == ["connection", "string"]:
        return True
    # Names of environment variables are upper-case, names of data columns are not.
    if name_words[-1] in ("pass", "pat"):
        return name.isupper()
    return "key" in name_words and (preceding_word in _SECRET_KEY_PREFIXES or name.isupper())


def mask_secrets(value: object, is_secret: bool = False, is_command: bool = False) -> Any:
    """Return ``value`` with masked secrets; interpolations (``${...}``) are not changed.

    Masked are texts under secret names, environment variables of processes, passwords in URLs, and
    keys of well-known services. With ``is_command``, values of secret options are masked too.
    """
    if isinstance(value, Mapping):
        return {
            name: mask_secrets(
                item,
                is_secret or is_secret_name(str(name)) or _holds_environment_variables(name, value),
                is_command or name in _KEYS_WITH_COMMANDS,
            )
            for name, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [
            mask_secrets(item, is_secret or _is_option_value(option, item), is_command)
            for item, option in zip(value, ["", *map(str, value)], strict=False)
        ]
    if isinstance(value, bytes):
        return MASK if is_secret else value
    if isinstance(value, str):
        if is_secret and value and not value.startswith("${"):
            return MASK
        if is_command or "://" in value:
            return _mask_patterns(value, is_command)
        return _SECRET_FORM_PATTERN.sub(MASK, value)
    return value


def find_masked_keys(values: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield the paths of the keys whose values ``mask_secrets`` has masked."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from find_masked_keys(value, f"{path}{name}.")
        elif _is_masked(value):
            yield f"{path}{name}"


def _is_masked(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(_is_masked(item) for item in value.values())
    if isinstance(value, list | tuple):
        return any(_is_masked(item) for item in value)
    # Texts such as prompts may contain the characters of the mask.
    return isinstance(value, str) and bool(_MASKED_TEXT_PATTERN.fullmatch(value))


def _is_option_value(option: str, argument: object) -> bool:
    if not option.startswith("-") or "=" in option or str(argument).startswith("-"):
        return False
    is_password = option in _PASSWORD_OPTIONS and not str(argument).isdigit()
    return is_password or is_secret_name(option)


def _holds_environment_variables(name: object, mapping: Mapping[Any, Any]) -> bool:
    return name == "env_vars" or (name in ("env", "environment") and "command" in mapping)


def mask_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a command line with their secrets masked."""
    return [
        MASK if _is_option_value(option, argument) else _mask_argument(argument)
        for option, argument in zip(["", *arguments], arguments, strict=False)
    ]


def _mask_argument(argument: str) -> str:
    key, separator, value = argument.partition("=")
    key_names = key.lstrip("+").split(".")
    if separator and any(name in _KEYS_WITH_ENVIRONMENT_VARIABLES for name in key_names):
        return argument if value.startswith("${") else f"{key}={MASK}"
    return mask_text(argument, is_command=True)


def register_secrets(values: Mapping[str, Any]) -> None:
    """Make ``mask_text`` mask the secrets in ``values``, also in texts without names of keys."""
    _registered_secrets.update(_iterate_secrets(values))


def _iterate_secrets(value: object, is_secret: bool = False) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _iterate_secrets(item, is_secret or is_secret_name(str(name)))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _iterate_secrets(item, is_secret)
    # Neither the path of a file with a secret nor a reference to a variable is a secret.
    elif isinstance(value, str) and is_secret and not value.startswith(("/", "${", "~")):
        yield from [value] if len(value) >= _MIN_MASKED_LENGTH else []


def mask_text(text: str, is_command: bool = False) -> str:
    """Return ``text`` without secrets: ``API_KEY=...``, passwords in URLs, registered values."""
    text = _mask_patterns(text, is_command)
    for value in sorted(_registered_secrets, key=len, reverse=True):
        text = text.replace(value, MASK)
    return text


def _mask_patterns(text: str, is_command: bool = False) -> str:
    def mask_pair(match: re.Match[str]) -> str:
        option = match[1].strip("'\", \t\n")
        is_secret = is_secret_name(match[2]) or (is_command and _is_option_value(option, match[3]))
        should_mask = is_secret and not match[3].startswith("$")
        return f"{match[1]}{MASK}" if should_mask else match[0]

    text = _SECRET_FORM_PATTERN.sub(MASK, _URL_PASSWORD_PATTERN.sub(rf"\1:{MASK}@", text))
    return _OPTION_PATTERN.sub(mask_pair, _KEY_VALUE_PATTERN.sub(mask_pair, text))
