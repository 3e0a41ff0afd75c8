"""Print the error messages of ``main_ppo`` for the commands in ``MISTAKES``, as Markdown.

    python scripts/dev/mistakes.py > docs/reference/mistakes.md

No run is started. A test compares the page with the messages.
"""

import contextlib
import io
import tempfile
from pathlib import Path
from unittest.mock import patch

from verl.trainer import main_ppo

SCRATCH = "SCRATCH"  # placeholder for the directory of the files that the commands name
MODEL_KEY = "actor_rollout_ref.model.path"
POLICY = f"{MODEL_KEY}=SCRATCH/policy"
COMMON_ARGUMENTS = f"{POLICY} env.env_name=number_line"
# Arguments of mistaken commands, by description of the mistake.
MISTAKES = {
    "prompts of files, in a run that would use an environment": (
        f"{POLICY} env.env_name=alfworld data.train_files=gsm8k/train.parquet"
    ),
    "user-provided questions, in a key that the environment does not read": (
        f"{POLICY} env.env_name=search data.train_files=nq/train.jsonl"
    ),
    "a group size of data jobs": f"{COMMON_ARGUMENTS} actor_rollout_ref.rollout.n=8",
    "a reward model that gives several numbers": (
        f"{COMMON_ARGUMENTS} reward_model.enable=true reward_model.model.path=SCRATCH/judge"
    ),
    "a reward function with other arguments": (
        f"{COMMON_ARGUMENTS} custom_reward_function.path=SCRATCH/reward.py"
    ),
    "a file that is no YAML": "--config-path SCRATCH --config-name invalid",
    "a mistyped directory of a config that makes its own policy": (
        f"{MODEL_KEY}=data/models/quikstart --config-name quickstart"
    ),
    "a hub name of a config that makes its own policy": (
        f"--config-name quickstart {MODEL_KEY}=nobody/no-such-model"
    ),
    "an empty directory for a model": f"{MODEL_KEY}=SCRATCH/empty env.env_name=number_line",
    "a tokenizer without chat template": (
        f"{MODEL_KEY}=SCRATCH/untemplated env.env_name=number_line"
    ),
    "a value that the model's config does not have": (
        f"{COMMON_ARGUMENTS} +actor_rollout_ref.model.override_config.hiden_size=64"
    ),
    "LoRA for modules that the model does not have": (
        f"{COMMON_ARGUMENTS} actor_rollout_ref.model.lora_rank=8 "
        "actor_rollout_ref.model.target_modules=[q_porj]"
    ),
    "an adapter to start from, in a directory without one": (
        f"{COMMON_ARGUMENTS} actor_rollout_ref.model.lora_adapter_path=SCRATCH/empty"
    ),
    "a GPU where there is none": "trainer.device=cuda",
    "a run directory that cannot be written": (
        f"{COMMON_ARGUMENTS} trainer.default_local_dir=/proc/run"
    ),
    "a directory that is no checkpoint": (
        f"{COMMON_ARGUMENTS} trainer.resume_mode=resume_path trainer.resume_from_path=SCRATCH/empty"
    ),
    "an unknown tracker": f"{COMMON_ARGUMENTS} trainer.logger=[console,wnadb]",
    "a cluster that does not answer": f"{COMMON_ARGUMENTS} ray_init.address=127.0.0.1:1",
    "prompts that are too long": f"{COMMON_ARGUMENTS} data.max_prompt_length=8",
    "images for a policy that reads text": (
        f"{POLICY} env.env_name=Sokoban env.sokoban.mode=rgb_array"
    ),
    "an unknown image mode": f"{POLICY} env.env_name=Sokoban env.sokoban.mode=vision",
    "the name that another project gives an environment": (
        f"{POLICY} env.env_name=sciworld/ScienceWorldEnv env.sciworld.env_step_limit=50"
    ),
    "another project's switch for thinking": (
        f"{POLICY} env.env_name=AlfWorld/AlfredTWEnv +env.alfworld.meta_think=True"
    ),
    "another project's choice of held-out tasks": (
        f"{POLICY} env.env_name=alfworld +env.alfworld.generalization_level=1"
    ),
    "another project's section of an estimator": (
        f"{COMMON_ARGUMENTS} algorithm.adv_estimator=copo +algorithm.copo.alpha=0.5"
    ),
    "a mistyped key and a mistyped estimator": (
        f"{COMMON_ARGUMENTS} trainer.total_epoch=3 algorithm.adv_estimator=gpro"
    ),
}


def write_scratch_files(scratch: Path) -> None:
    """Write the files that mistaken commands name, for example a policy without chat template."""
    # Imported here, because these modules load torch, which other users of MISTAKES do not need.
    from rlvcr.levels import TAGS
    from verl.config.schema.sft import NewPolicyConfig
    from verl.models.new_policy import build_policy

    texts = ["go left", "go right"]
    policy_config = NewPolicyConfig(hidden_size=32, head_dim=32, max_position_embeddings=4096)
    policy, policy_without_template = (
        build_policy(scratch / name, texts, policy_config, tags=TAGS, vocab_size=400)
        for name in ("policy", "untemplated")
    )
    (policy_without_template / "chat_template.jinja").unlink()
    _build_reward_model(scratch / "judge", policy)
    (scratch / "empty").mkdir()
    (scratch / "invalid.yaml").write_text("trainer: {seed: 1\nenv: [\n")
    (scratch / "reward.py").write_text("def compute_score(answer):\n    return 1.0\n")


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


def format_mistake(number: int, description: str, scratch: Path) -> str:
    """Run the command of a mistake. Return its section of the page, with its error message.

    No training starts. If the command would start a run, the section says so.
    """
    errors = io.StringIO()
    arguments = MISTAKES[description].replace(SCRATCH, str(scratch)).split()
    with (
        patch.object(main_ppo, "train") as train_mock,
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(errors),
    ):
        status = main_ppo.main(arguments)
    outcome = "it starts" if train_mock.called else f"exit status {status}"
    message = errors.getvalue().replace(str(scratch), SCRATCH).rstrip("\n")
    return f"""
## {number}. {description}: {outcome}

```
$ python -m verl.trainer.main_ppo {MISTAKES[description]}
{message}
```
"""


PAGE_HEAD = f"""\
# What {len(MISTAKES)} mistaken commands print

Printed by `python scripts/dev/mistakes.py`; every command ends with exit status 2
before anything is started. `SCRATCH` is a directory with a tiny policy and invalid
files.
"""

if __name__ == "__main__":
    print(PAGE_HEAD, end="")
    with tempfile.TemporaryDirectory(prefix="mistakes-") as folder:
        write_scratch_files(Path(folder))
        for number, description in enumerate(MISTAKES, start=1):
            print(format_mistake(number, description, Path(folder)), end="")
