"""Twenty questions: an environment package, a ``MultistepEnv`` and gamemasters over one table of things.

Names are resolved on first use, so that an environment worker imports only what it plays.
"""

import importlib

_HOME = {
    "EmbeddedGamemaster": "gamemaster",
    "GamemasterError": "gamemaster",
    "OpenAIGamemaster": "openai_gamemaster",
    "TwentyQuestionsEnv": "multistep_env",
}
__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
