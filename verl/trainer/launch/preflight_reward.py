"""Checks of the reward model's files before a run starts."""

from collections.abc import Iterator
from pathlib import Path

from agent_system.tokens.tokenizer import is_chat_tokenizer
from verl.config.checks.models import ALLOWED, fix_for_missing
from verl.config.problems import build_problem
from verl.config.schema import PPOConfig
from verl.models.hub import description_directory
from verl.models.loader import read_config
from verl.models.weights import UnusableWeights, check_weights

PATH = "reward_model.model.path"
ALLOWED_KIND = "a model for sequence classification with one label"


def find_reward_model_problems(cfg: PPOConfig) -> Iterator[str]:
    """Yield problems of the reward model: it must exist, have one label and a chat template."""
    model = cfg.reward_model.model
    if not cfg.reward_model.enable or model.path is None:
        return
    # Imported only here: the import takes seconds.
    from transformers import AutoTokenizer

    try:
        directory = Path(description_directory(model.path))
    except FileNotFoundError as error:
        yield build_problem(cfg, PATH, str(error), ALLOWED, fix_for_missing(cfg, PATH))
        return
    try:
        config = read_config(directory, model.trust_remote_code)
        tokenizer = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=model.trust_remote_code
        )
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        allowed = "a model and a tokenizer that transformers can load"
        yield build_problem(cfg, PATH, why, allowed, "correct the files of the directory")
        return
    architectures = config.architectures or []
    if not any(name.endswith("ForSequenceClassification") for name in architectures):
        why = f"it is a {', '.join(architectures) or config.model_type}"
        yield build_problem(cfg, PATH, why, ALLOWED_KIND, f"set {PATH} to such a model")
    elif config.num_labels != 1:
        why = f"it has {config.num_labels} labels"
        yield build_problem(cfg, PATH, why, ALLOWED_KIND, f"set {PATH} to such a model")
    elif Path(model.path).is_dir():
        try:
            check_weights(
                directory,
                config,
                setting=f"{PATH}={model.path!r}",
                use="reward",
                trust_remote_code=model.trust_remote_code,
            )
        except UnusableWeights as error:
            yield str(error)
    if not is_chat_tokenizer(tokenizer):
        why = "its tokenizer has no chat template to render conversations"
        fix = "put a chat_template.jinja into its directory"
        yield build_problem(cfg, PATH, why, "a chat template", fix)
