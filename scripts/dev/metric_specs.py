"""Declarations of all metrics of a run: name, formula, averaged items, and unit.

``python -m scripts.dev.reference`` writes the page ``docs/reference/metrics.md``.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """Declaration of a metric, or of several: ``*`` in ``name`` stands for any text.

    ``over`` names the items over which the metric is averaged.
    """

    name: str
    formula: str
    over: str
    unit: str


def _make_specs(unit: str, *rows: tuple[str, str, str]) -> tuple[MetricSpec, ...]:
    return tuple(MetricSpec(name, formula, over, unit) for name, formula, over in rows)


GRADED_TRAJECTORIES = "graded trajectories (`val/graded`)"
GRADED_TRAINING_TRAJECTORIES = "graded trajectories (`episode/graded`)"
GRADED_TRAJECTORIES_WITH_VALUE = "graded trajectories that have it"
SAMPLED_TOKENS = "sampled tokens"
CREDITED_TOKENS = "tokens with a thinking advantage"
OPTIMIZER_STEPS = "`actor/optimizer_steps`"
STEP = "step"
ALL_TRAJECTORIES = "all trajectories (`rollout/trajectories`)"
SPECS: tuple[MetricSpec, ...] = (
    *_make_specs(
        "share",
        (
            "val/success_rate*",
            "successes / trajectories; 95% bootstrap bounds over tasks",
            GRADED_TRAJECTORIES,
        ),
        ("val/*/success_rate*", "the same of a data source or of a rule of levels", "its `graded`"),
        ("val/*/pass@*", "the same of a data source", "its graded samples"),
        ("val/*/maj@*", "the same of a data source", "its graded samples"),
        ("val/pass@*", "chance that one of K samples succeeds", "tasks with K graded samples"),
        ("val/maj@*", "success of the answer that most of K give", "tasks with K graded samples"),
        ("episode/success_rate", "successes / trajectories", GRADED_TRAINING_TRAJECTORIES),
        ("episode/*/success_rate", "the same of a data source", "`episode/<source>/graded`"),
        (
            "episode/valid_action_ratio",
            "turns with a valid action / turns",
            GRADED_TRAINING_TRAJECTORIES,
        ),
        ("rollout/active_ratio", "mean time in flight / duration of the rollout", ALL_TRAJECTORIES),
        ("rollout/truncated_*", "trajectories that ended for the reason / all", ALL_TRAJECTORIES),
        ("rollout/summaries_cut", "summaries cut at their limit / summaries", "summaries"),
        ("rollout/summaries_empty", "summaries without text / summaries", "summaries"),
        ("*/level_share_*", "turns at the level / turns with a level", "`rlvcr/level_steps`"),
        ("val/levels_in/*/share_*", "turns at the level / turns", "its `steps`"),
        ("rlvcr/level_success_*", "turns of successful trajectories / turns", "the level's turns"),
        (
            "rlvcr/level_forced_share",
            "turns with a forced level / turns",
            GRADED_TRAINING_TRAJECTORIES,
        ),
        ("rlvcr/parse_fail_*", "turns that failed so / turns", GRADED_TRAINING_TRAJECTORIES),
        ("rlvcr/dropped_*", "alternatives dropped for the reason / alternatives", "sampled ones"),
        ("rlvcr/credited_token_share", "tokens with a thinking advantage / tokens", SAMPLED_TOKENS),
        (
            "rlvcr/sign_flip_share",
            "tokens whose sign it changed / tokens",
            "tokens with a thinking advantage and a trajectory advantage other than 0",
        ),
        (
            "rlvcr/thinking_share",
            "size of thinking advantages / sizes of both parts",
            CREDITED_TOKENS,
        ),
        ("actor/pg_clipfrac", "tokens clipped by the ratio / tokens", SAMPLED_TOKENS),
        ("actor/pg_clipfrac_lower", "tokens clipped by `clip_ratio_c` / tokens", SAMPLED_TOKENS),
        ("critic/vf_clipfrac", "tokens whose value was clipped / tokens", SAMPLED_TOKENS),
        ("critic/rows_without_advantage", "rows whose advantages are all 0 / rows", "rows"),
        (
            "critic/groups_of_equal_returns",
            "groups with one return / groups",
            "groups of 2 or more",
        ),
        (
            "rollout_corr/rollout_is_ratio_fraction_high",
            "truncated tokens / tokens",
            SAMPLED_TOKENS,
        ),
        ("rollout_corr/rollout_is_eff_sample_size", "(sum w)^2 / (n sum w^2)", SAMPLED_TOKENS),
        ("rollout_corr/rollout_rs_masked_fraction", "rejected tokens / tokens", SAMPLED_TOKENS),
        (
            "training/rollout_probs_diff_*",
            "|p of engine - p of trainer|: mean, max, std",
            SAMPLED_TOKENS,
        ),
        ("perf/mfu/*", "`perf/tflops` of the role / peak of the device", "update of the role"),
        ("val/*_change*", "difference / value of the other rule", "tasks graded on both sides"),
    ),
    *_make_specs(
        "reward",
        ("val/episode_reward", "mean return", GRADED_TRAJECTORIES),
        ("val/*/episode_reward", "the same of a data source", "`val/<source>/graded`"),
        ("val/*/best@*", "expected best return of K samples of a data source", "its tasks"),
        ("val/best@*", "expected best return of K samples", "tasks with K graded samples"),
        ("val/reward/*", "mean, max, min of a named reward", "its `graded`"),
        ("reward/*", "mean, max, min of a named reward", "its `graded`"),
        ("episode/reward*", "mean, max, min return", GRADED_TRAINING_TRAJECTORIES),
        ("critic/score/*", "mean, max, min of the rows' scores", "rows"),
        ("critic/rewards/*", "scores minus the KL penalty", "rows"),
        ("critic/advantages/*", "mean, max, min", "sampled tokens"),
        ("critic/returns/*", "mean, max, min", "sampled tokens"),
        ("critic/values/*", "mean, max, min", "sampled tokens"),
        ("audit/levels/*", "mean return minus that of all levels", "audited points"),
    ),
    *_make_specs(
        "count",
        ("val/tasks*", "tasks; of them those with K graded samples", "the validation set"),
        ("val/trajectories", "trajectories", "the validation set"),
        ("*/graded", "items that have a grade", "-"),
        ("val/aborted", "trajectories that failed", "`val/trajectories`"),
        ("*/failed", "trajectories or scores that failed", "-"),
        ("rollout/trajectories", "trajectories, failed ones included", "-"),
        ("rollout/summaries", "summaries / trajectories (`env.compact`)", ALL_TRAJECTORIES),
        ("rollout/aborted*", "trajectories that failed, by reason", "`rollout/trajectories`"),
        ("rollout/left_out_*", "trajectories not trained on", "`rollout/trajectories`"),
        ("rollout/gen_batches", "batches generated (`algorithm.filter_groups`)", "-"),
        ("rollout/groups_with_spread", "groups whose returns differ", "generated groups"),
        ("rollout/env_restarts", "environment workers that died or hung and were replaced", "-"),
        ("rollout/collectors_lost", "collectors that were lost and replaced", "-"),
        ("rlvcr/level_steps", "turns with a level that the policy chose", "-"),
        ("rlvcr/levels_unseen", "levels not seen for `collapse_patience` steps", "-"),
        ("audit/points*", "audited points; those that failed", "-"),
        ("audit/plays", "trajectories per level (or action) and point", "-"),
        ("training/global_step", "training steps so far", "-"),
        ("training/epoch", "epochs of the training tasks so far", "-"),
        ("actor/optimizer_steps", "optimizer steps of the update, skipped ones included", "-"),
        ("actor/skipped_steps", "steps skipped for a gradient that is not finite", OPTIMIZER_STEPS),
        (
            "actor/zero_steps",
            "steps whose rows have no advantage and no other loss",
            OPTIMIZER_STEPS,
        ),
        ("rlvcr/expanded_steps", "turns with alternative thoughts", "-"),
        ("rlvcr/valid_contexts_mean", "scored thoughts / turns", "`rlvcr/expanded_steps`"),
    ),
    *_make_specs(
        "tokens",
        ("rollout/tokens_per_episode", "sampled tokens / trajectories", ALL_TRAJECTORIES),
        ("rollout/summary_tokens", "sampled tokens of summaries / trajectories", ALL_TRAJECTORIES),
        ("val/tokens_per_episode", "sampled tokens / trajectories", GRADED_TRAJECTORIES),
        ("val/levels/*tokens_per_episode", "sampled tokens / trajectories", "its `graded`"),
        ("*tokens_per_step*", "tokens of turns / turns", "graded trajectories"),
        ("episode/turn_tokens", "sampled tokens / turns", GRADED_TRAINING_TRAJECTORIES),
        ("response_length/*", "mean, max, min of the rows", "rows"),
        ("prompt_length/*", "mean, max, min of the rows", "rows"),
        ("rlvcr/thought_tokens_mean", "tokens of thoughts / thoughts", "turns with a thought"),
        ("rlvcr/alternative_tokens", "tokens sampled for alternatives", "-"),
        ("rlvcr/branch_tokens_ratio", "tokens scored for alternatives / tokens", "tokens of rows"),
        ("perf/total_num_tokens", "tokens of prompts and responses, without padding", "-"),
        ("perf/engine_tokens", "tokens that the engines sampled", "-"),
        ("perf/engine_batch", "sampled tokens / engine steps", "engine steps"),
        ("perf/update_*_tokens", "tokens of the rows of the role's update", "-"),
    ),
    *_make_specs(
        "turns",
        ("*/episode_length", "turns / trajectories", "graded trajectories"),
        ("episode/length", "turns / trajectories", GRADED_TRAINING_TRAJECTORIES),
        ("val/levels_in/*/steps", "turns with a level", "-"),
    ),
    *_make_specs(
        "seconds",
        ("timing_s/step", "step without validation and saving", STEP),
        ("timing_s/gen", "collecting: rollout, alternatives, packing, scoring", STEP),
        ("timing_s/gen_engine", "part of the rollout that turns took", "waits of trajectories"),
        ("timing_s/gen_env", "part of the rollout that environments took", "waits of trajectories"),
        ("timing_s/alternatives", "part of the rollout that alternatives took", "by tokens"),
        ("timing_s/pack", "packing rows", STEP),
        ("timing_s/scoring", "scoring of thoughts, and old log-probs", STEP),
        ("timing_s/old_log_prob", "old log-probs", STEP),
        ("timing_s/ref", "log-probs of the reference", STEP),
        ("timing_s/values", "values of the critic", STEP),
        ("timing_s/reward", "rewards", STEP),
        ("timing_s/adv", "advantages", STEP),
        ("timing_s/update_actor", "update of the policy", STEP),
        ("timing_s/update_critic", "update of the critic", STEP),
        ("timing_s/update_weights", "weight sync to the engines", STEP),
        ("timing_s/sleep", "engines free their memory before the update", STEP),
        ("timing_s/testing", "validation", STEP),
        ("timing_s/save_checkpoint", "saving, or its copy with `trainer.async_save`", STEP),
        ("perf/time_per_step", "duration of the step", STEP),
        ("perf/engine_busy_s", "time in which engines sampled, summed over engines", STEP),
        ("perf/update_*_seconds", "duration of the role's update", STEP),
        ("rollout/*_wait_s", "mean wait of a trajectory", ALL_TRAJECTORIES),
    ),
    *_make_specs(
        "number",
        (
            "val/env/*/mean",
            "mean of the last value of a number in `info`",
            GRADED_TRAJECTORIES_WITH_VALUE,
        ),
        (
            "env/*/mean",
            "mean of the last value of a number in `info`",
            GRADED_TRAJECTORIES_WITH_VALUE,
        ),
        ("*/level_information*", "mutual information of level and situation, nats", "turns"),
        ("rollout/policy_version", "mean version of the weights that sampled", SAMPLED_TOKENS),
        (
            "rollout/policy_version_min",
            "oldest version of the weights that sampled",
            SAMPLED_TOKENS,
        ),
        ("training/staleness", "updates since the weights that sampled, mean", SAMPLED_TOKENS),
        ("training/staleness_max", "updates since the weights that sampled, most", SAMPLED_TOKENS),
        ("training/rollout_log_probs_diff_max", "largest |log p difference|, nats", SAMPLED_TOKENS),
        ("rollout_corr/kl", "mean of log p of engine - log p of trainer, nats", SAMPLED_TOKENS),
        (
            "rollout_corr/k3_kl",
            "mean of r - 1 - log r, r = p of trainer / p of engine",
            SAMPLED_TOKENS,
        ),
        ("rollout_corr/ppl_ratio", "perplexity of trainer / of engine, mean", "sequences"),
        ("rollout_corr/rollout_is_*", "weight of the correction: mean, min, max", SAMPLED_TOKENS),
        ("val/*_difference*", "value minus that of the other rule", "tasks graded on both sides"),
        ("val/levels_in/*/needed_level", "mean required level", "its `steps`"),
        ("rlvcr/score_logprob", "log-prob of the action under its thought", "scored turns"),
        ("rlvcr/score_entropy", "entropy of the action under its thought", "scored turns"),
        ("rlvcr/advantage_abs_mean", "mean |thinking advantage|", "`rlvcr/expanded_steps`"),
        ("rlvcr/trajectory_advantage_abs_mean", "mean |trajectory advantage|", CREDITED_TOKENS),
        ("rlvcr/posterior_of_chosen", "mean posterior of the drawn level", "its turns"),
        ("rlvcr/posterior_shift", "mean distance of posterior and policy", "its turns"),
        ("rlvcr/group_price_share", "turns with a partner / turns", "turns"),
        ("rlvcr/group_price_abs_mean", "mean |price of the turn's tokens|", "turns"),
        ("rlvcr/thinking_advantage_abs_mean", "mean |thinking advantage|", CREDITED_TOKENS),
        ("rlvcr/cost_share_mean", "mean price share of the thinking advantage", CREDITED_TOKENS),
        ("actor/pg_loss", "policy loss, summed as `loss_agg_mode` says", SAMPLED_TOKENS),
        ("actor/ppo_kl", "mean of old - new log-prob", SAMPLED_TOKENS),
        ("actor/kl_loss", "KL to the reference in the loss", SAMPLED_TOKENS),
        ("actor/reward_kl_penalty", "mean of the rows' mean KL to the reference", "rows"),
        ("actor/reward_kl_penalty_coeff", "its coefficient", STEP),
        ("actor/price_multiplier", "factor of all token prices", STEP),
        ("actor/entropy", "mean entropy of the next token, nats", SAMPLED_TOKENS),
        ("actor/level_entropy", "mean entropy of the level among its four digits, nats", "levels"),
        ("*/grad_norm", "norm of the gradient before clipping, mean", "steps not skipped"),
        ("*/lr", "learning rate of the last optimizer step", STEP),
        ("critic/optimizer_steps", "as of the actor", STEP),
        ("critic/skipped_steps", "as of the actor", OPTIMIZER_STEPS),
        ("critic/zero_steps", "as of the actor", OPTIMIZER_STEPS),
        ("critic/vf_loss", "value loss", SAMPLED_TOKENS),
        ("critic/vpred_mean", "mean predicted value", SAMPLED_TOKENS),
        ("perf/throughput", "`perf/total_num_tokens` / seconds / devices", STEP),
        ("perf/engine_throughput", "`perf/engine_tokens` / `perf/engine_busy_s`", STEP),
        ("perf/weight_sync_bytes", "bytes that each engine received in the weight sync", STEP),
        ("perf/tree_token_ratio*", "tokens of rows (and branches) / computed", "passes"),
        ("perf/tflops/*", "10^12 operations / second / device", "update of the role"),
        ("perf/max_memory_allocated_gb*", "GiB of tensors on the fullest GPU, peak", "run so far"),
        ("perf/max_memory_reserved_gb*", "GiB reserved on the fullest GPU, peak", "run so far"),
        ("perf/cpu_memory_used_gb*", "GiB of the role's largest process, peak", "run so far"),
        ("audit/scores/*", "rank correlation of a credit rule with effects", "audited points"),
        ("audit/reliability", "expected correlation of two audits", "audited points"),
    ),
)
PAGE_HEAD = """\
# Every metric

Generated by `python -m scripts.dev.reference`; do not edit.
`*` stands for any text. The first line that matches a name describes it.
A failed trajectory (its environment, engine or grader failed) has no grade.
No rate and no mean of grades counts it.
Losses, entropies and shares of `actor/` and `critic/` are computed in each optimizer step.
The metric is their mean.

| name | formula | over | unit |
|---|---|---|---|
"""


def find_spec(name: str, specs: Iterable[MetricSpec] = SPECS) -> MetricSpec | None:
    """Return the first declaration that matches the metric ``name``, or None.

    Metrics of unit ``count`` are tried first.
    """
    ordered = sorted(specs, key=lambda spec: spec.unit != "count")
    return next((spec for spec in ordered if fnmatchcase(name, spec.name)), None)


def format_metrics_page() -> str:
    """Return the page of all metrics as Markdown."""
    ordered = sorted(SPECS, key=lambda spec: spec.unit != "count")
    return PAGE_HEAD + "".join(
        f"| `{spec.name}` | {spec.formula} | {spec.over} | {spec.unit} |\n" for spec in ordered
    )
