"""The composition root of a measurement: a run that plays the validation panel, once for every way
of choosing levels, and trains nothing.
"""

from verl.config.schema import PPOConfig

# Before the user's words, so that those win. A directory of its own: metrics of the training are
# not touched.
EVAL_OVERRIDES = (
    "trainer.val_only=true",
    "cold_start.enable=false",
    "trainer.default_local_dir=runs/${trainer.project_name}/${trainer.experiment_name}-eval",
)


def run_evaluation(cfg: PPOConfig) -> None:
    """Measure the policy that ``cfg`` names; everything heavy is imported from here on."""
    from verl.trainer.launch.level_comparison import evaluate

    evaluate(cfg)
