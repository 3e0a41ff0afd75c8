"""Evaluation of a policy on the validation set, with a comparison of thinking levels.

validation set ──policy chooses levels──▶ rows ──▶ level shares, required levels ──▶ rules
validation set ──a rule forces levels──▶ rows ──▶ comparison
"""

import logging
import re
from collections.abc import Mapping

from agent_system.multi_turn_rollout.rollout_settings import should_request_levels
from rlvcr.level_metrics import compute_levels_by_situation
from rlvcr.records import ThinkingTurnRecord
from rlvcr.report_sections import (
    FREE_DIFFERENCE_TABLE,
    ORACLE_DIFFERENCE_TABLE,
    RULE_TABLE,
    SITUATION_TABLE,
)
from rlvcr.research.level_rules import select_level_rules
from rlvcr.settings import get_rlvcr_settings
from verl.config.schema import PPOConfig
from verl.protocol import DataProto
from verl.record.console import show_tables
from verl.report_sections import MetricColumn, MetricTable, list_data_sources
from verl.trainer.launch.ppo import OpenRun, open_run
from verl.trainer.ppo.validation_comparison import (
    compare_outcomes,
    compute_differences,
    summarize_validation,
)

logger = logging.getLogger(__name__)
AT_K_METRIC_PATTERN = re.compile(r"val/(pass|best|maj)@\d+")
FREE_LEVELS_NAME = "free"  # the policy chooses the levels
ORACLE_RULE_NAME = "oracle"


def evaluate_policy(cfg: PPOConfig) -> None:
    """Measure success and return of the policy on the validation set.

    If the policy chooses thinking levels, also compare rules that force them. Print tables, and
    write metrics and report of the run.
    """
    with open_run(cfg) as run:
        trainer = run.trainer
        trainer.prepare(will_train=False)
        free_level_rows = trainer.validate()
        if should_request_levels(cfg):
            trainer.metrics |= compare_levels(run, cfg, free_level_rows)
        metrics = trainer.drain_metrics()
        trainer.journal.log_step(trainer.global_step, metrics)
        trainer.journal.finish_run()
    print_table_by_data_source(metrics)
    print_level_tables(metrics)


def print_table_by_data_source(metrics: Mapping[str, float]) -> None:
    """Print success and return on the validation set, per data source of the tasks."""
    prefixes = tuple(f"val/{source}/" for source in list_data_sources(metrics))
    # For each k in the metrics of all tasks, show pass@k, best@k and maj@k of every data source.
    at_k_keys = [key for key in metrics if AT_K_METRIC_PATTERN.fullmatch(key)]
    at_k_metric_names = [key.removeprefix("val/") for key in at_k_keys]
    columns = [
        MetricColumn("success_rate", "success", "{:.1%}"),
        MetricColumn("episode_reward", "reward", "{:.4g}"),
        *(MetricColumn(key, key, "{:.4g}") for key in at_k_metric_names),
    ]
    source_metrics = {key: value for key, value in metrics.items() if key.startswith(prefixes)}
    show_tables([MetricTable("Held-out tasks", "val", "source", tuple(columns))], source_metrics)


def compare_levels(run: OpenRun, cfg: PPOConfig, free_level_rows: DataProto) -> dict[str, float]:
    """Run the validation set with thinking levels forced by each rule; return comparison metrics.

    ``free_level_rows`` are the rows of the validation in which the policy chose the levels. Return
    {} if ``algorithm.rlvcr.eval_levels`` has no rule.
    """
    trainer = run.trainer
    turns = [turn for row in free_level_rows.non_tensor_batch["steps"] for turn in row]
    thinking_turns = [turn for turn in turns if isinstance(turn, ThinkingTurnRecord)]
    level_rules = select_level_rules(get_rlvcr_settings(cfg.algorithm).eval_levels, thinking_turns)
    if not level_rules:
        return {}
    outcome_by_rule = {FREE_LEVELS_NAME: summarize_validation(free_level_rows)}
    for rule_name, rule in level_rules.items():
        logger.info("validation set under rule %s", rule_name)
        with trainer.clock.measure_part("testing"):
            tasks = trainer.val_envs.panel_batch()
            batch = run.collector.panel_loop(tasks, trainer.workers, rule)
        outcome_by_rule[rule_name] = summarize_validation(batch)
    metrics = compare_outcomes(outcome_by_rule, FREE_LEVELS_NAME, RULE_TABLE.prefix)
    if ORACLE_RULE_NAME in outcome_by_rule:
        metrics |= compute_differences(
            outcome_by_rule, ORACLE_RULE_NAME, ORACLE_DIFFERENCE_TABLE.prefix
        )
    return metrics | compute_levels_by_situation(thinking_turns, SITUATION_TABLE.prefix)


def print_level_tables(metrics: dict[str, float]) -> None:
    """Print the tables that compare thinking levels. Omit tables without values in ``metrics``."""
    show_tables(
        (RULE_TABLE, FREE_DIFFERENCE_TABLE, ORACLE_DIFFERENCE_TABLE, SITUATION_TABLE), metrics
    )
