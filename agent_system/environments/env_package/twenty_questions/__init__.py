"""Twenty questions: an environment package, a ``MultistepEnv`` and gamemasters over one table of
things.

Names are resolved on first use, so that an environment worker imports only what it plays.
"""

from verl.utils.lazy import lazy

__getattr__, __all__ = lazy(
    __name__,
    {
        "EmbeddedGamemaster": "gamemaster",
        "GamemasterError": "gamemaster",
        "OpenAIGamemaster": "openai_gamemaster",
        "TwentyQuestionsEnv": "multistep_env",
    },
)
