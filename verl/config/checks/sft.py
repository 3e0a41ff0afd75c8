"""Checks of supervised runs: size of a new policy, length of rows and files."""

from pathlib import Path

from verl.config.checks.models import check_directory
from verl.config.problems import CheckContext, Problems, build_problem
from verl.config.schema import SFTConfig
from verl.config.settings import value_at_path


def check_sft(cfg: SFTConfig, ctx: CheckContext) -> Problems:
    """Check that the policy can be built and that rows fit into its context."""
    model = cfg.model
    data = cfg.data
    new_model = cfg.model.new
    yield from check_directory(cfg, "model.path", ctx)
    if (
        model.path is None
        and new_model.head_dim is None
        and new_model.hidden_size % new_model.num_attention_heads
    ):
        why = "hidden_size is not a multiple of it"
        yield build_problem(
            cfg,
            "model.new.num_attention_heads",
            why,
            "a divisor of model.new.hidden_size",
            "choose one",
        )
    # Grouped-query attention: every key/value head has the same number of query heads.
    if model.path is None and new_model.num_attention_heads % new_model.num_key_value_heads:
        why, allowed = (
            "num_attention_heads is not a multiple of it",
            "a divisor of model.new.num_attention_heads",
        )
        yield build_problem(cfg, "model.new.num_key_value_heads", why, allowed, "choose one")
    if model.path is None and data.max_length > new_model.max_position_embeddings:
        allowed = f"model.new.max_position_embeddings ({new_model.max_position_embeddings}) or less"
        yield build_problem(
            cfg, "data.max_length", "rows must fit the policy's context", allowed, "lower it"
        )
    if cfg.trainer.nnodes > 1:
        why = "a supervised run uses the devices of one machine"
        yield build_problem(cfg, "trainer.nnodes", why, "1", "trainer.nnodes=1")
    if data.max_token_len_per_gpu < data.max_length:
        allowed = f"data.max_length ({data.max_length}) or more"
        yield build_problem(
            cfg, "data.max_token_len_per_gpu", "the longest row must fit", allowed, "raise it"
        )
    for key in ("data.train_files", "data.val_files"):
        missing_files = [
            name for name in value_at_path(cfg, key) if ctx.check_files and not Path(name).is_file()
        ]
        if missing_files:
            yield build_problem(
                cfg,
                key,
                f"no such file: {', '.join(missing_files)}",
                "existing files",
                "correct the paths",
            )
