"""Construction of ``main_audit``, which compares estimated advantages of levels with returns.

RUN_DIR ─▶ its config and newest policy ─▶ trajectories with estimated advantages (scores)
    ─▶ from some of their turns: trajectories continued with every level
    ─▶ comparison of their returns with the scores ─▶ RUN_DIR/audit
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from verl.config.run_code import TRUST_OVERRIDES, refuse_code_of_run
from verl.config.schema import PPOConfig
from verl.trainer.cli import Inspection
from verl.trainer.launch.extensions import inspect_start

logger = logging.getLogger(__name__)
CONFIG_FILE = "config.yaml"
# Estimate the advantage of all four levels in every turn. Trajectories are on-policy: no forced
# levels, no permuted advantages, no omitted turns, no partial rollouts.
SCORED_OVERRIDES = (
    "algorithm.rlvcr.credit=scored",
    "algorithm.rlvcr.alternatives=all",
    "algorithm.rlvcr.expand=all",
    "algorithm.rlvcr.step_fraction=1.0",
    "algorithm.rlvcr.permute=false",
    "algorithm.rlvcr.epsilon_levels=0.0",
    "env.rollout.carry_over=0",
)


def build_audit_args(args: Sequence[str]) -> list[str]:
    """Return ``RUN_DIR [key=value ...]`` as a command line of ``main_ppo``; else ``ValueError``."""
    if not args or args[0].startswith("-"):
        # Without a run directory only options such as --help apply.
        return list(args) or ["--help"]
    directory = Path(args[0])
    if not (directory / CONFIG_FILE).is_file():
        raise ValueError(
            f"RUN_DIR={args[0]!r}: there is no {CONFIG_FILE}; allowed: the directory of a run; "
            "fix: python -m verl.trainer.main_audit runs/PROJECT/EXPERIMENT [key=value ...]"
        )
    # Imported when called: the import takes seconds.
    from verl.utils.checkpoint import CheckpointManager

    if not TRUST_OVERRIDES & set(args):
        refuse_code_of_run(Path(CONFIG_FILE).stem, args[0], args[1:], PPOConfig, is_run=True)
    # Load the newest checkpoint of the run, or else its initial policy.
    newest = CheckpointManager(directory / "checkpoints").find_latest_valid()
    policy_overrides = ["trainer.resume_mode=disable"]
    if newest is not None:
        policy_overrides = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={newest}"]
    return [
        *("--config-path", str(directory.resolve()), "--config-name", Path(CONFIG_FILE).stem),
        *SCORED_OVERRIDES,
        "cold_start.enable=false",
        f"trainer.default_local_dir={directory / 'audit'}",
        *policy_overrides,
        *args[1:],
    ]


def inspect_audit(cfg: PPOConfig, elsewhere: bool = False) -> Inspection:
    """Return the problems of ``inspect_start``, and the numbers of trajectories for the plan."""
    from agent_system.multi_turn_rollout.rollout_settings import should_request_levels
    from rlvcr.levels import LEVELS
    from rlvcr.settings import method_settings

    if not should_request_levels(cfg):
        return Inspection(
            [
                "env.levels=false: a policy without thinking levels has no thinking advantage; "
                "allowed: runs with env.levels=true; fix: audit another run"
            ]
        )
    inspection = inspect_start(cfg, elsewhere)
    rlvcr = method_settings(cfg.algorithm)
    tasks = min(rlvcr.audit_tasks, rlvcr.audit_points)
    tasks = min(tasks, inspection.facts.get("val_tasks") or tasks)
    total = rlvcr.audit_points * len(LEVELS) * rlvcr.audit_plays
    audit = (
        f"{tasks} validation tasks x {cfg.env.rollout.n} trajectories; from {rlvcr.audit_points} "
        f"of their turns at most, {len(LEVELS)} levels x {rlvcr.audit_plays} trajectories "
        f"= {total:,} at most"
    )
    return Inspection(inspection.problems, {**inspection.facts, "audit": audit})


def run_audit(cfg: PPOConfig) -> None:
    """Run the comparison for the policy of ``cfg``. Heavy packages are imported only here."""
    from rlvcr.research.audit import audit_scores
    from rlvcr.settings import method_settings
    from verl.trainer.launch.audit_record import (
        compute_audit_metrics,
        compute_turn_scores,
        print_audit_tables,
        write_points,
    )
    from verl.trainer.launch.ppo import open_run

    if cfg.trainer.resume_mode == "disable":
        logger.warning("the run has no checkpoint: auditing its policy before training")
    with open_run(cfg) as run:
        trainer = run.trainer
        trainer.prepare()
        rlvcr = method_settings(cfg.algorithm)
        # At most the existing tasks, and at most one task per audited turn.
        count = min(rlvcr.audit_tasks, rlvcr.audit_points, len(trainer.val_envs.task_list))
        tasks = trainer.val_envs.gen_batch(1, count)
        data, points = run.collector.audit_loop(tasks, trainer.workers, trainer.val_envs)
        num_failed = data.meta_info["metrics"]["audit/points_failed"]
        if num_failed:
            logger.warning(
                "%d of %d points failed and are ignored", num_failed, num_failed + len(points)
            )
        trainer.journal.log_rollouts(trainer.global_step, data)
        turn_scores = compute_turn_scores(trainer.compute_rewards(data), cfg)
        points = [
            replace(point, step_scores=turn_scores[point.traj_uid, point.step]) for point in points
        ]
        result = audit_scores(points)
        # Write the file before the report, which shows it.
        path = write_points(points, result, Path(cfg.trainer.default_local_dir))
        metrics = compute_audit_metrics(result)
        metrics["audit/points_failed"] = num_failed
        trainer.journal.log_step(trainer.global_step, metrics)
        trainer.journal.finish_run()
    print_audit_tables(metrics)
    logger.info(
        "%d points, %d trajectories at each of 4 levels; two audits of these points would "
        "correlate by %.2f; all trajectories: %s",
        result.points,
        result.plays,
        result.reliability,
        path,
    )
