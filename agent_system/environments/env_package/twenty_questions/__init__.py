"""Twenty questions: an environment package, a ``MultistepEnv``, and gamemasters.

Exported names are imported on first use, so a worker imports only the modules that it needs.
"""

from verl.utils.lazy import make_lazy_exports

__getattr__, __all__ = make_lazy_exports(
    __name__,
    {
        "EmbeddedGamemaster": "gamemaster",
        "GamemasterError": "gamemaster",
        "OpenAIGamemaster": "openai_gamemaster",
        "TwentyQuestionsEnv": "multistep_env",
    },
)
