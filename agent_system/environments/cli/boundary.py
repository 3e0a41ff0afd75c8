"""Errors of code that may be the user's own, in one sentence."""

import traceback


def described(error: BaseException) -> str:
    """Return kind, message and place of ``error`` in one line; the message alone where it says how
    to fix it.
    """
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    message = " ".join(str(error).split()) or "no message"
    if "; fix: " in message:
        return message
    return f"{type(error).__name__}: {message}{place}"
