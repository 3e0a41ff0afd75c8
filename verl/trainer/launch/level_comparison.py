"""A measurement of the levels: the panel played as the policy chooses, then under every rule of
``algorithm.rlvcr.eval_levels``.

    panel ──free──▶ rows ──▶ shares, needed levels ──▶ rules ──the same panel──▶ rows ──▶ comparison
"""

import logging
import re
from collections.abc import Mapping

from agent_system.multi_turn_rollout.play_settings import asks_for_levels
from rlvcr.level_metrics import levels_by_situation
from rlvcr.records import ThinkingStep
from rlvcr.report_sections import BY_RULE, BY_SITUATION, LESS_FREE, LESS_ORACLE
from rlvcr.research.level_rules import rules_after
from rlvcr.settings import method_settings
from verl.config.schema import PPOConfig
from verl.protocol import DataProto
from verl.record.console import show_tables
from verl.report_sections import MetricColumn, MetricTable
from verl.trainer.launch.ppo import OpenRun, open_run
from verl.trainer.ppo.panel_plays import comparison, differences, panel_play

logger = logging.getLogger(__name__)
SOURCE_RATE = re.compile(r"val/[^/]+/success_rate")
REPEATED = re.compile(r"val/(pass|best|maj)@\d+")
FREE_NAME = "free"
ORACLE_NAME = "oracle"


def evaluate(cfg: PPOConfig) -> None:
    """Measure the policy that ``cfg`` names; tables to standard output, metrics and report to the
    run directory.
    """
    with open_run(cfg) as run:
        trainer = run.trainer
        trainer.prepare()
        played = trainer.validate()
        if asks_for_levels(cfg):
            trainer.metrics |= compare_levels(run, cfg, played)
        metrics = trainer.drain_metrics()
        trainer.journal.log_step(trainer.global_step, metrics)
        trainer.journal.finish()
    show_sources(metrics)
    show(metrics)


def show_sources(metrics: Mapping[str, float]) -> None:
    """Write what the panel earned, for each source of its tasks."""
    rates = [key for key in metrics if SOURCE_RATE.fullmatch(key)]
    sources = tuple(key.removesuffix("success_rate") for key in rates)
    # Of one source its numbers are those of the whole panel as well.
    repeated = [key.removeprefix("val/") for key in metrics if REPEATED.fullmatch(key)]
    columns = [
        MetricColumn("success_rate", "success", "{:.1%}"),
        MetricColumn("episode_reward", "reward", "{:.4g}"),
        *(MetricColumn(key, key, "{:.4g}") for key in repeated),
    ]
    shown = {key: value for key, value in metrics.items() if key.startswith(sources)}
    show_tables([MetricTable("Held-out tasks", "val", "source", tuple(columns))], shown)


def compare_levels(run: OpenRun, cfg: PPOConfig, played: DataProto) -> dict[str, float]:
    """Metrics of the panel under every rule, after it was ``played`` freely; none where nothing is
    compared.
    """
    trainer = run.trainer
    steps = [step for row in played.non_tensor_batch["steps"] for step in row]
    thinking = [step for step in steps if isinstance(step, ThinkingStep)]
    rules = rules_after(method_settings(cfg.algorithm).eval_levels, thinking)
    if not rules:
        return {}
    plays = {FREE_NAME: panel_play(played)}
    for name, rule in rules.items():
        logger.info("the panel again: %s", name)
        with trainer.clock.measure("testing"):
            panel = trainer.val_envs.panel_batch()
            batch = run.collector.panel_loop(panel, trainer.workers, rule)
        plays[name] = panel_play(batch)
    found = comparison(plays, FREE_NAME, BY_RULE.prefix)
    if ORACLE_NAME in plays:
        found |= differences(plays, ORACLE_NAME, LESS_ORACLE.prefix)
    return found | levels_by_situation(thinking, BY_SITUATION.prefix)


def show(metrics: dict[str, float]) -> None:
    """Write the tables of the comparison that ``metrics`` hold."""
    show_tables((BY_RULE, LESS_FREE, LESS_ORACLE, BY_SITUATION), metrics)
