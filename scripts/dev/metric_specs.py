"""All metrics of a run, declared: name, formula, what it is over, unit.

``python -m scripts.dev.reference`` writes the page ``docs/reference/metrics.md``.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """A metric, or a family of them: ``*`` in ``name`` stands for any text."""

    name: str
    formula: str
    over: str
    unit: str


def _specs(unit: str, *rows: tuple[str, str, str]) -> tuple[MetricSpec, ...]:
    return tuple(MetricSpec(name, formula, over, unit) for name, formula, over in rows)


GRADED = "graded trajectories (`val/graded`)"
PLAYED = "graded trajectories (`episode/graded`)"
EVERY = "all trajectories (`rollout/trajectories`)"
SPECS: tuple[MetricSpec, ...] = (
    *_specs(
        "share",
        ("val/success_rate*", "successes / trajectories; 95% bootstrap bounds over tasks", GRADED),
        ("val/*/success_rate*", "the same of a data source or of a rule of levels", "its `graded`"),
        ("val/*/pass@*", "the same of a data source", "its graded samples"),
        ("val/*/maj@*", "the same of a data source", "its graded samples"),
        ("val/pass@*", "chance that one of K samples succeeds", "tasks with K graded samples"),
        ("val/maj@*", "success of the answer that most of K give", "tasks with K graded samples"),
        ("episode/success_rate", "successes / trajectories", PLAYED),
        ("episode/*/success_rate", "the same of a data source", "`episode/<source>/graded`"),
        ("episode/valid_action_ratio", "turns with a valid action / turns", PLAYED),
        ("rollout/active_ratio", "mean time in flight / duration of the rollout", EVERY),
        ("rollout/truncated_*", "trajectories that ended for the reason / all", EVERY),
        ("*/level_share_*", "turns at the level / turns with a level", "`rlvcr/level_steps`"),
        ("val/levels_in/*/share_*", "turns at the level / turns", "its `steps`"),
        ("rlvcr/level_success_*", "turns of successful trajectories / turns", "the level's turns"),
        ("rlvcr/level_forced_share", "turns with a forced level / turns", PLAYED),
        ("rlvcr/parse_fail_*", "turns that failed so / turns", PLAYED),
        ("rlvcr/executed_dropped", "alternatives without a value / alternatives", "executed"),
        ("actor/*clipfrac*", "clipped tokens / sampled tokens", "sampled tokens"),
        ("val/*_change*", "difference / value of the other rule", "tasks graded on both sides"),
        ("critic/rows_without_advantage", "rows whose advantages are all 0 / rows", "rows"),
        ("critic/groups_of_equal_returns", "groups of two or more with equal returns", "groups"),
        ("rollout_corr/*_fraction*", "truncated or rejected tokens / tokens", "sampled tokens"),
        ("rollout_corr/rollout_is_eff_sample_size", "effective samples / tokens", "sampled tokens"),
        ("rlvcr/dropped_*", "dropped alternatives / sampled alternatives", "alternatives"),
        ("rlvcr/thinking_share", "size of the thinking part / size of both parts", "credited"),
        ("rlvcr/sign_flip_share", "tokens whose sign thinking credit turned / tokens", "credited"),
        ("rlvcr/credited_token_share", "tokens with thinking credit / tokens", "sampled tokens"),
        ("rlvcr/cost_share_mean", "part of the thinking credit that is price", "credited"),
        ("perf/mfu/*", "operations of the update / peak of the device", "update"),
    ),
    *_specs(
        "reward",
        ("val/episode_reward", "mean return", GRADED),
        ("val/*/episode_reward", "the same of a data source", "`val/<source>/graded`"),
        ("val/*/best@*", "expected best return of K samples of a data source", "its tasks"),
        ("val/best@*", "expected best return of K samples", "tasks with K graded samples"),
        ("val/reward/*", "mean, max, min of a named reward", "its `graded`"),
        ("reward/*", "mean, max, min of a named reward", "its `graded`"),
        ("episode/reward*", "mean, max, min return", PLAYED),
        ("critic/score/*", "mean, max, min of the rows' scores", "rows"),
        ("critic/rewards/*", "scores less the KL penalty", "rows"),
        ("critic/advantages/*", "mean, max, min", "sampled tokens"),
        ("critic/returns/*", "mean, max, min", "sampled tokens"),
        ("critic/values/*", "mean, max, min", "sampled tokens"),
        ("audit/levels/*", "mean return less that of all levels", "audited points"),
    ),
    *_specs(
        "count",
        ("val/tasks*", "tasks; of them those with K graded samples", "the panel"),
        ("val/trajectories", "trajectories", "the panel"),
        ("*/graded", "items that have a grade", "-"),
        ("val/aborted", "trajectories that failed", "`val/trajectories`"),
        ("*/failed", "trajectories or scores that failed", "-"),
        ("rollout/trajectories", "trajectories, failed ones included", "-"),
        ("rollout/aborted*", "trajectories that failed, by reason", "`rollout/trajectories`"),
        ("rollout/left_out_*", "trajectories not trained on", "`rollout/trajectories`"),
        ("rollout/g*", "batches drawn; groups whose returns differ", "-"),
        ("rlvcr/level_steps", "turns with a level that the policy chose", "-"),
        ("rlvcr/levels_unseen", "levels not seen for `collapse_patience` steps", "-"),
        ("audit/points*", "audited points; those that failed", "-"),
        ("audit/plays", "trajectories per level and point", "-"),
        ("training/*", "counters, staleness and engine mismatch", "step or sampled tokens"),
    ),
    *_specs(
        "tokens",
        ("*tokens_per_episode", "sampled tokens / trajectories", "as its rate"),
        ("*tokens_per_step*", "tokens of turns / turns", "graded trajectories"),
        ("episode/turn_tokens", "sampled tokens / turns", PLAYED),
        ("response_length/*", "mean, max, min of the rows", "rows"),
        ("prompt_length/*", "mean, max, min of the rows", "rows"),
        ("rlvcr/*tokens*", "tokens of thoughts or alternatives", "turns, or the batch"),
    ),
    *_specs(
        "turns",
        ("*/episode_length", "turns / trajectories", "graded trajectories"),
        ("episode/length", "turns / trajectories", PLAYED),
        ("val/levels_in/*/steps", "turns with a level", "-"),
    ),
    *_specs(
        "seconds",
        ("timing_s/*", "duration of a part of the step", "step"),
        ("rollout/*_wait_s", "mean wait of a trajectory", EVERY),
    ),
    *_specs(
        "number",
        ("*/level_information*", "mutual information of level and situation, nats", "turns"),
        ("training/rollout_probs_diff_*", "engine's minus trainer's probability", "tokens"),
        ("rollout_corr/kl", "KL of the trainer from the engine, first estimator, nats", "tokens"),
        ("rollout_corr/k3_kl", "KL of the trainer from the engine, third estimator", "tokens"),
        ("rollout_corr/ppl_ratio", "trainer's / engine's perplexity of a sequence", "sequences"),
        ("rollout_corr/*", "weights of the rollout correction", "sampled tokens"),
        ("rollout/policy_version*", "version of the weights that sampled", "sampled tokens"),
        ("actor/level_entropy", "entropy over the four level digits, at most 1.386 nats", "turns"),
        ("actor/entropy", "mean entropy, nats", "sampled tokens"),
        ("actor/pg_loss", "policy loss", "sampled tokens"),
        ("actor/ppo_kl", "old minus new log-prob, nats", "sampled tokens"),
        ("actor/kl_loss", "KL to the reference, nats", "sampled tokens"),
        ("actor/reward_kl_penalty*", "KL in the reward, and its coefficient", "sampled tokens"),
        ("actor/grad_norm", "gradient norm before clipping", "optimizer steps"),
        ("actor/lr", "last learning rate", "step"),
        ("actor/optimizer_steps", "optimizer steps", "step"),
        ("actor/skipped_steps", "steps skipped for a non-finite gradient", "step"),
        ("actor/zero_steps", "steps without anything to learn", "step"),
        ("rlvcr/score_*", "score of the action after the sampled thought", "scored turns"),
        ("rlvcr/advantage_abs_mean", "mean size of the thinking advantage", "scored turns"),
        ("rlvcr/*_advantage_abs_mean", "mean size of one part of the credit", "credited tokens"),
        ("rlvcr/valid_contexts_mean", "scored thoughts per turn, at most 4", "scored turns"),
        ("rlvcr/executed_slope", "slope of worth on confidence", "executed turns"),
        ("rlvcr/executed_correlation", "rank correlation of the two", "executed turns"),
        ("rlvcr/executed_steps", "turns at which another level was executed", "step"),
        ("rlvcr/expanded_steps", "turns with alternative thoughts", "step"),
        ("perf/throughput", "tokens per second and device", "step"),
        ("perf/engine_*", "tokens, busy seconds, tokens per second, batch of the engines", "step"),
        ("perf/tflops/*", "10^12 operations per second and device", "update"),
        ("perf/max_memory_*", "GiB on the fullest GPU so far", "run"),
        ("perf/cpu_memory_used_gb", "GiB of the largest process so far", "run"),
        ("rollout/*", "policy version, engine and pool figures", "sampled tokens, or step"),
        ("val/*_difference*", "value less that of the other rule", "tasks graded on both sides"),
        ("val/levels_in/*/needed_level", "mean required level", "its `steps`"),
        ("rlvcr/*", "scores and advantages of the method", "scored turns"),
        ("actor/*", "loss, entropy, KL, gradient norm, learning rate", "sampled tokens, or step"),
        ("critic/*", "loss and gradient norm of the critic", "sampled tokens, or step"),
        ("perf/*", "throughput, memory, utilisation", "step"),
        ("audit/*", "rank correlations and reliability", "audited points"),
    ),
)
HEAD = """\
# Every metric

Generated by `python -m scripts.dev.reference`; do not edit.
`*` stands for any text. The first line that matches a name describes it.
A failed trajectory (its environment, engine or grader failed) has no grade.
No rate and no mean of grades counts it.

| name | formula | over | unit |
|---|---|---|---|
"""


def spec_of(name: str, specs: Iterable[MetricSpec] = SPECS) -> MetricSpec | None:
    """Return the declaration of the metric ``name``; counts are looked for first."""
    ordered = sorted(specs, key=lambda spec: spec.unit != "count")
    return next((spec for spec in ordered if fnmatchcase(name, spec.name)), None)


def page() -> str:
    """Return the page of all metrics as Markdown."""
    ordered = sorted(SPECS, key=lambda spec: spec.unit != "count")
    return HEAD + "".join(
        f"| `{spec.name}` | {spec.formula} | {spec.over} | {spec.unit} |\n" for spec in ordered
    )
