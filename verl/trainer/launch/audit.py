"""Construction of ``main_audit``, which compares the credit of estimators with measured returns.

Credit is the advantage that an estimator gives to a decision: an action, or a thinking level (how
long the agent thinks in a turn).

RUN_DIR ─▶ config and newest policy ─▶ trajectories, with the credit of every estimator
    ─▶ some of their turns, each continued to the end with every level or several actions
    ─▶ comparison of the returns with the credit ─▶ RUN_DIR/audit
"""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from verl.config.compose import quote_override
from verl.config.derive import find_post_rollout_reward_key
from verl.config.problems import build_conflict, build_problem
from verl.config.run_code import TRUST_ARGUMENTS, refuse_code_in_run_directory
from verl.config.schema import PPOConfig
from verl.config.settings.errors import ConfigError, Problem, UserError, get_problem_code
from verl.records import PRICE_MULTIPLIER
from verl.trainer.cli import PreflightResult
from verl.trainer.launch.extensions import run_preflight_checks

if TYPE_CHECKING:
    from agent_system.multi_turn_rollout.audit_rollouts import RecordedTrajectory
    from rlvcr.research.audit import AuditedTurn
    from verl.trainer.launch.audit_files import ExternalScores

logger = logging.getLogger(__name__)
CONFIG_FILE = "config.yaml"
# Changes of the run's config for an audit. An audit scores all alternatives in every turn of
# trajectories that the policy alone has sampled, without random choices and partial rollouts.
AUDIT_OVERRIDES = (
    "algorithm.rlvcr.credit=scored",
    "algorithm.rlvcr.alternatives=all",
    "algorithm.rlvcr.expand=all",
    "algorithm.rlvcr.step_fraction=1.0",
    "algorithm.rlvcr.permute=false",
    "algorithm.rlvcr.epsilon_levels=0.0",
    "env.rollout.carry_over=0",
    "trainer.rollout_data_dir=null",  # this folder has the trajectories of training
)


def build_audit_args(args: Sequence[str]) -> list[str]:
    """Return the ``main_ppo`` arguments for ``args`` of the form ``RUN_DIR [key=value ...]``."""
    if not args or args[0].startswith("-"):
        # Without a run directory only options such as --help apply.
        return list(args) or ["--help"]
    directory = Path(args[0])
    if not (directory / CONFIG_FILE).is_file():
        raise UserError(
            f"RUN_DIR={args[0]!r}: there is no {CONFIG_FILE}; allowed: the directory of a run; "
            "fix: python -m verl.trainer.main_audit runs/PROJECT/EXPERIMENT [key=value ...]",
            "missing_file",
        )
    # Import in the function, because the import takes seconds.
    from verl.utils.checkpoint import CheckpointManager

    config_name = Path(CONFIG_FILE).stem
    if not TRUST_ARGUMENTS & set(args):
        refuse_code_in_run_directory(
            config_name, args[0], args[1:], PPOConfig, is_run_directory=True
        )
    # Load the newest checkpoint of the run, or else its initial policy.
    newest_checkpoint = CheckpointManager(directory / "checkpoints").find_latest_valid()
    policy_overrides = ["trainer.resume_mode=disable"]
    if newest_checkpoint is not None:
        policy_overrides = [
            "trainer.resume_mode=resume_path",
            quote_override("trainer.resume_from_path", newest_checkpoint),
        ]
    return [
        *("--config-path", str(directory.resolve()), "--config-name", config_name),
        *AUDIT_OVERRIDES,
        "cold_start.enable=false",
        quote_override("trainer.default_local_dir", directory / "audit"),
        *policy_overrides,
        *args[1:],
    ]


def run_audit_preflight_checks(
    cfg: PPOConfig, ignores_local_devices: bool = False
) -> PreflightResult:
    """Check environment, tokenizer, engine and the user's files of ``main_audit``.

    Return the problems found, and facts that the printed plan of the run shows.
    """
    from agent_system.environments.env_registry import get_package
    from agent_system.multi_turn_rollout.rollout_settings import should_request_levels
    from rlvcr.levels import LEVELS
    from rlvcr.settings import get_rlvcr_settings

    preflight_result = run_preflight_checks(cfg, ignores_local_devices)
    if preflight_result.problems:
        return preflight_result
    if get_package(cfg.env.env_name).runs_agent:
        text = (
            f"env.env_name={cfg.env.env_name!r}: its agent runs in the environment, so its turns "
            "cannot be replayed; allowed: environments that step by action"
        )
        return PreflightResult([Problem(text, "conflicting_keys")])
    reward_problems = list(find_audited_reward_problems(cfg))
    if reward_problems:
        return PreflightResult(reward_problems)
    rlvcr_settings = get_rlvcr_settings(cfg.algorithm)
    try:
        recorded_trajectories, _ = read_audit_files(cfg)
    except (OSError, ValueError) as error:
        return PreflightResult([Problem(str(error), get_problem_code(error, "unreadable_file"))])
    has_thinking_levels = should_request_levels(cfg)
    num_options = len(LEVELS) if has_thinking_levels else rlvcr_settings.audit_actions
    num_tasks = min(rlvcr_settings.audit_tasks, rlvcr_settings.audit_points)
    num_tasks = min(num_tasks, preflight_result.facts.get("val_tasks") or num_tasks)
    trajectories_text = f"{num_tasks} validation tasks x {cfg.env.rollout.n} trajectories"
    max_trajectories = rlvcr_settings.audit_points * num_options * rlvcr_settings.audit_plays
    if recorded_trajectories:
        trajectories_text = f"{len(recorded_trajectories)} recorded trajectories"
    options_text = f"{num_options} {'levels' if has_thinking_levels else 'actions'}"
    audit_text = (
        f"{trajectories_text}; from {rlvcr_settings.audit_points} of their turns at most, "
        f"{options_text} x {rlvcr_settings.audit_plays} trajectories = {max_trajectories:,} at most"
    )
    return PreflightResult(
        preflight_result.problems, {**preflight_result.facts, "audit_text": audit_text}
    )


def find_audited_reward_problems(cfg: PPOConfig) -> Iterator[Problem]:
    """Yield a problem if the run trains on other rewards than those of the environment."""
    key = find_post_rollout_reward_key(cfg)
    if key is None:
        return
    override_by_key = {
        "custom_reward_function.path": "custom_reward_function.path=null",
        "reward_model.enable": "reward_model.enable=false reward_model.model.path=null "
        "reward_model.weight=1 reward_model.rule_weight=1",
    }
    why = "the run trains on its scores, but an audit measures returns of the environment"
    allowed = "rewards of the environment"
    fix = f"audit the credit for rewards of the environment: {override_by_key[key]}"
    yield build_conflict(cfg, key, why, allowed, fix)


def read_audit_files(cfg: PPOConfig) -> "tuple[list[RecordedTrajectory], ExternalScores]":
    """Return the trajectories to replay and the user's scores of turns, from the files in ``cfg``.

    Each result is empty if ``cfg`` names no file. Raises ``UserError`` with file and line for an
    invalid line, and for a score that names several trajectories. Raises ``OSError`` for a file
    that cannot be read.
    """
    from rlvcr.settings import get_rlvcr_settings
    from verl.trainer.launch.audit_files import (
        read_external_scores,
        read_recorded_trajectories,
        refuse_ambiguous_scores,
    )
    from verl.trainer.launch.preflight_prompts import open_task_environments

    rlvcr_settings = get_rlvcr_settings(cfg.algorithm)
    scores_file = rlvcr_settings.audit_scores_file
    external_scores = {} if scores_file is None else read_external_scores(scores_file)
    recorded_trajectories = []
    if rlvcr_settings.audit_trajectories is not None:
        task_lists = [envs.task_list for envs in open_task_environments(cfg)]
        tasks = {task["task_id"]: task for task_list in task_lists for task in task_list}
        recorded_trajectories = read_recorded_trajectories(rlvcr_settings.audit_trajectories, tasks)
    refuse_ambiguous_scores(external_scores, recorded_trajectories, cfg.env.rollout.n)
    return recorded_trajectories, external_scores


def require_audited_turns(cfg: PPOConfig, audited_turns: "Sequence[AuditedTurn]") -> None:
    """Raise ``ConfigError`` if no turn was audited."""
    if audited_turns:
        return
    why = (
        "no turn could be audited: each turn was incomplete, lacked a thought at a level, or had a "
        "failed rollout (the trajectories are in the run directory)"
    )
    allowed = "a policy that completes turns within env.max_turn_tokens"
    fix = "raise env.max_turn_tokens, or audit a later checkpoint"
    problem = build_problem(cfg, "env.max_turn_tokens", why, allowed, fix, "no_rows")
    raise ConfigError([problem])


def run_audit(cfg: PPOConfig) -> None:
    """Compare the advantages of all estimators with measured returns, for the policy of ``cfg``."""
    from rlvcr.research.audit import correlate_scores
    from rlvcr.settings import get_rlvcr_settings
    from verl.trainer.launch.audit_credit import add_credits
    from verl.trainer.launch.audit_files import add_external_scores
    from verl.trainer.launch.audit_record import (
        compute_audit_metrics,
        print_audit_tables,
        write_audit_file,
    )
    from verl.trainer.launch.ppo import open_run

    if cfg.trainer.resume_mode == "disable":
        logger.warning("the run has no checkpoint: auditing its policy before training")
    recorded_trajectories, external_scores = read_audit_files(cfg)
    with open_run(cfg) as run:
        trainer = run.trainer
        trainer.prepare(will_train=False)
        rlvcr_settings = get_rlvcr_settings(cfg.algorithm)
        # The number of tasks is limited by the existing tasks and by the number of audited turns.
        num_tasks = min(
            rlvcr_settings.audit_tasks, rlvcr_settings.audit_points, len(trainer.val_envs.task_list)
        )
        tasks = trainer.val_envs.gen_batch(1, num_tasks)
        tasks.meta_info[PRICE_MULTIPLIER] = trainer.price_controller.multiplier
        rollout_rows, scored_rows, audited_turns = run.collector.audit_loop(
            tasks, trainer.workers, trainer.val_envs, recorded_trajectories
        )
        num_failed = rollout_rows.meta_info["metrics"]["audit/points_failed"]
        if num_failed:
            logger.warning(
                "%d of %d points are ignored: a rollout failed, or no other action was sampled",
                num_failed,
                num_failed + len(audited_turns),
            )
        trainer.journal.log_rollouts(trainer.global_step, rollout_rows)
        require_audited_turns(cfg, audited_turns)
        scored_rows = trainer.compute_rewards(trainer.compute_log_probs_and_values(scored_rows))
        audited_turns, skip_reasons = add_credits(audited_turns, scored_rows, cfg)
        audited_turns = add_external_scores(audited_turns, external_scores)
        for name, reason in skip_reasons.items():
            logger.info("estimator %s is skipped: %s", name, reason)
        audit_result = correlate_scores(audited_turns)
        # Write the file first, because the report reads it.
        directory = Path(cfg.trainer.default_local_dir)
        path = write_audit_file(audited_turns, audit_result, directory, skip_reasons)
        metrics = compute_audit_metrics(audit_result)
        metrics["audit/points_failed"] = num_failed
        trainer.journal.log_step(trainer.global_step, metrics)
        trainer.journal.finish_run()
    print_audit_tables(metrics)
    logger.info(
        "%d points, %d trajectories with each level or action; two audits of these points would "
        "correlate by %.2f; all trajectories: %s",
        audit_result.points,
        audit_result.rollouts_per_option,
        audit_result.reliability,
        path,
    )
