"""Print the error messages of ``main_ppo`` for mistaken commands, as Markdown.

    python scripts/dev/mistakes.py

The commands are listed in ``MISTAKES``. No run is started. If a command would start although it is
mistaken, the page says so. ``docs/reference/mistakes.md`` has the output, and a test compares the
messages with it.
"""

import argparse
import contextlib
import io
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from verl.trainer import main_ppo

SCRATCH = "SCRATCH"  # placeholder for the directory of the files that the commands name
POLICY_OVERRIDE = f"actor_rollout_ref.model.path={SCRATCH}/policy"
COMMON_OVERRIDES = (POLICY_OVERRIDE, "env.env_name=number_line")
MODEL_PATH_KEY = "actor_rollout_ref.model.path"


@dataclass(frozen=True)
class Mistake:
    """Mistaken command of ``main_ppo`` (``words``), and two texts that its message must contain.

    ``expected_start`` is the wrong key with its value. ``fix`` is a part of the proposed fix.
    """

    description: str
    words: tuple[str, ...]
    expected_start: str
    fix: str


MISTAKES = (
    Mistake(
        "prompts of files, in a run that would use an environment",
        (POLICY_OVERRIDE, "env.env_name=alfworld", "data.train_files=gsm8k/train.parquet"),
        "data.train_files=['gsm8k/train.parquet']",
        "or do not set env.env_name",
    ),
    Mistake(
        "user-provided questions, in a key that the environment does not read",
        (POLICY_OVERRIDE, "env.env_name=search", "data.train_files=nq/train.jsonl"),
        "data.train_files=['nq/train.jsonl']",
        "env.search.train_questions=nq/train.jsonl",
    ),
    Mistake(
        "a group size of data jobs",
        (*COMMON_OVERRIDES, "actor_rollout_ref.rollout.n=8"),
        "actor_rollout_ref.rollout.n=8",
        "env.rollout.n=8",
    ),
    Mistake(
        "a reward model that gives several numbers",
        (*COMMON_OVERRIDES, "reward_model.enable=true", f"reward_model.model.path={SCRATCH}/judge"),
        f"reward_model.model.path='{SCRATCH}/judge'",
        "such a model",
    ),
    Mistake(
        "a reward function with other arguments",
        (*COMMON_OVERRIDES, f"custom_reward_function.path={SCRATCH}/reward.py"),
        "custom_reward_function.name='compute_score'",
        "**kwargs",
    ),
    Mistake(
        "a file that is no YAML",
        ("--config-path", SCRATCH, "--config-name", "invalid"),
        "config 'invalid'",
        "correct that line",
    ),
    Mistake(
        "a mistyped directory of a config that makes its own policy",
        (f"{MODEL_PATH_KEY}=data/models/quikstart", "--config-name", "quickstart"),
        f"{MODEL_PATH_KEY}='data/models/quikstart'",
        "cold_start.enable=true",
    ),
    Mistake(
        "a hub name of a config that makes its own policy",
        ("--config-name", "quickstart", f"{MODEL_PATH_KEY}=nobody/no-such-model"),
        f"{MODEL_PATH_KEY}='nobody/no-such-model'",
        "hf download nobody/no-such-model",
    ),
    Mistake(
        "an empty directory for a model",
        (f"{MODEL_PATH_KEY}={SCRATCH}/empty", "env.env_name=number_line"),
        f"{MODEL_PATH_KEY}='{SCRATCH}/empty'",
        "name the directory that holds the model",
    ),
    Mistake(
        "a tokenizer without chat template",
        (f"{MODEL_PATH_KEY}={SCRATCH}/untemplated", "env.env_name=number_line"),
        f"{MODEL_PATH_KEY}='{SCRATCH}/untemplated'",
        "chat_template.jinja",
    ),
    Mistake(
        "a value that the model's config does not have",
        (*COMMON_OVERRIDES, "+actor_rollout_ref.model.override_config.hiden_size=64"),
        "actor_rollout_ref.model.override_config.hiden_size=64",
        "actor_rollout_ref.model.override_config.hidden_size=64",
    ),
    Mistake(
        "LoRA for modules that the model does not have",
        (
            *COMMON_OVERRIDES,
            "actor_rollout_ref.model.lora_rank=8",
            "actor_rollout_ref.model.target_modules=[q_porj]",
        ),
        "actor_rollout_ref.model.target_modules=['q_porj']",
        "q_proj",
    ),
    Mistake(
        "an adapter to start from, in a directory without one",
        (*COMMON_OVERRIDES, f"actor_rollout_ref.model.lora_adapter_path={SCRATCH}/empty"),
        f"actor_rollout_ref.model.lora_adapter_path='{SCRATCH}/empty'",
        "main_export lora=adapters",
    ),
    Mistake(
        "a GPU where there is none",
        ("trainer.device=cuda",),
        "trainer.device='cuda'",
        "trainer.device=cpu",
    ),
    Mistake(
        "a run directory that cannot be written",
        (*COMMON_OVERRIDES, "trainer.default_local_dir=/proc/run"),
        "trainer.default_local_dir='/proc/run'",
        "a writable directory",
    ),
    Mistake(
        "a directory that is no checkpoint",
        (
            *COMMON_OVERRIDES,
            "trainer.resume_mode=resume_path",
            f"trainer.resume_from_path={SCRATCH}/empty",
        ),
        f"trainer.resume_from_path='{SCRATCH}/empty'",
        "global_step_",
    ),
    Mistake(
        "an unknown tracker",
        (*COMMON_OVERRIDES, "trainer.logger=[console,wnadb]"),
        "trainer.logger=['console', 'wnadb']",
        "wandb",
    ),
    Mistake(
        "a cluster that does not answer",
        (*COMMON_OVERRIDES, "ray_init.address=127.0.0.1:1"),
        "ray_init.address='127.0.0.1:1'",
        "ray_init.address=null",
    ),
    Mistake(
        "prompts that are too long",
        (*COMMON_OVERRIDES, "data.max_prompt_length=8"),
        "data.max_prompt_length=8",
        "data.max_prompt_length=",
    ),
    Mistake(
        "images for a policy that reads text",
        (POLICY_OVERRIDE, "env.env_name=Sokoban", "env.sokoban.mode=rgb_array"),
        "env.sokoban.mode='rgb_array'",
        "env.sokoban.mode=text",
    ),
    Mistake(
        "an unknown image mode",
        (POLICY_OVERRIDE, "env.env_name=Sokoban", "env.sokoban.mode=vision"),
        "env.sokoban.mode='vision'",
        "env.sokoban.mode='text'",
    ),
    Mistake(
        "the name that another project gives an environment",
        (
            POLICY_OVERRIDE,
            "env.env_name=sciworld/ScienceWorldEnv",
            "env.sciworld.env_step_limit=50",
        ),
        "env.sciworld.env_step_limit=50",
        "env.max_steps",
    ),
    Mistake(
        "another project's switch for thinking",
        (POLICY_OVERRIDE, "env.env_name=AlfWorld/AlfredTWEnv", "+env.alfworld.meta_think=True"),
        "env.alfworld.meta_think=True",
        "env.levels",
    ),
    Mistake(
        "another project's choice of held-out tasks",
        (POLICY_OVERRIDE, "env.env_name=alfworld", "+env.alfworld.generalization_level=1"),
        "env.alfworld.generalization_level=1",
        "env.alfworld.eval_dataset",
    ),
    Mistake(
        "another project's section of an estimator",
        (*COMMON_OVERRIDES, "algorithm.adv_estimator=copo", "+algorithm.copo.alpha=0.5"),
        "algorithm.copo.alpha=0.5",
        "algorithm.rlvcr",
    ),
    Mistake(
        "a mistyped key and a mistyped estimator",
        (*COMMON_OVERRIDES, "trainer.total_epoch=3", "algorithm.adv_estimator=gpro"),
        "trainer.total_epoch=3",
        "trainer.total_epochs",
    ),
)


def write_scratch_files(scratch: Path) -> None:
    """Write the files that mistaken commands name, for example a policy without chat template."""
    # Imported here, because these modules load torch, which other users of MISTAKES do not need.
    from rlvcr.levels import TAGS
    from verl.config.schema.sft import NewPolicyConfig
    from verl.models.new_policy import build_policy

    texts = ["go left", "go right"]
    shape = NewPolicyConfig(hidden_size=32, head_dim=32, max_position_embeddings=2048)
    policy, policy_without_template = (
        build_policy(scratch / name, texts, shape, tags=TAGS, vocab_size=400)
        for name in ("policy", "untemplated")
    )
    (policy_without_template / "chat_template.jinja").unlink()
    _build_reward_model(scratch / "judge", policy)
    (scratch / "empty").mkdir()
    (scratch / "invalid.yaml").write_text("trainer: {seed: 1\nenv: [\n")
    (scratch / "reward.py").write_text("def compute_score(answer):\n    return 1.0\n")
    assert (policy / "config.json").is_file()


def _build_reward_model(directory: Path, policy: Path) -> None:
    """Write a reward model, a classifier of two labels, with the tokenizer of ``policy``."""
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForSequenceClassification

    config = Qwen2Config(
        vocab_size=400,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    Qwen2ForSequenceClassification(config).save_pretrained(directory)
    AutoTokenizer.from_pretrained(policy).save_pretrained(directory)


def run_mistake(mistake: Mistake, scratch: Path) -> tuple[int | None, str]:
    """Run the mistaken command. Return its exit status and its error message.

    No training starts. The status is None if the command would have started a run.
    """
    started_runs: list[object] = []
    arguments = [word.replace(SCRATCH, str(scratch)) for word in mistake.words]
    output_stream = io.StringIO()
    error_stream = io.StringIO()
    with (
        _record_instead_of_training(started_runs),
        contextlib.redirect_stdout(output_stream),
        contextlib.redirect_stderr(error_stream),
    ):
        status = main_ppo.main(arguments)
    text = error_stream.getvalue().replace(str(scratch), SCRATCH)
    return (None if started_runs else status), text


@contextlib.contextmanager
def _record_instead_of_training(started_runs: list[object]) -> Iterator[None]:
    train = main_ppo.train
    main_ppo.train = started_runs.append
    try:
        yield
    finally:
        main_ppo.train = train


def format_mistakes_page(scratch: Path) -> Iterator[str]:
    """Yield the lines of the Markdown page with all mistaken commands and their messages."""
    yield f"# What {len(MISTAKES)} mistaken commands print"
    yield ""
    yield "Printed by `python scripts/dev/mistakes.py`; every command ends with exit status 2"
    yield "before anything is started. `SCRATCH` is a directory with a tiny policy and invalid"
    yield "files."
    for mistake_number, mistake in enumerate(MISTAKES, start=1):
        status, text = run_mistake(mistake, scratch)
        ended = "it starts" if status is None else f"exit status {status}"
        yield ""
        yield f"## {mistake_number}. {mistake.description}: {ended}"
        yield ""
        yield "```"
        yield f"$ python -m verl.trainer.main_ppo {' '.join(mistake.words)}"
        yield text.rstrip("\n")
        yield "```"


def main() -> int:
    """Command line entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mistakes-") as name:
        write_scratch_files(Path(name))
        for line in format_mistakes_page(Path(name)):
            sys.stdout.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
