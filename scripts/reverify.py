"""Replay the stored trajectories of a run, action by action, and report rewards that differ.

    python scripts/reverify.py runs/rlvcr/quickstart                  # every rollout file
    python scripts/reverify.py runs/rlvcr/quickstart --file val_30 --limit 20

Task, seed and settings are those of the run. Failed trajectories are skipped. The replay of a
trajectory stops at a truncated turn, because the environment never received an action of this turn.
The exit status is 1 if rewards differ.
"""

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from agent_system.environments.env import EnvFailure, Task
from agent_system.environments.env_registry import (
    canonicalize_env_name,
    get_package,
    read_env_settings,
)
from agent_system.environments.pool.environment_pool import EnvironmentPool, PoolSession
from agent_system.environments.tasks import SEED_MASK
from verl.config.run_code import refuse_code_in_stored_config
from verl.config.schema.env import EnvConfig
from verl.record.report.trajectory_chunks import read_trajectories
from verl.utils.commands import (
    UsageError,
    convert_read_errors,
    read_yaml_mapping,
    run_and_report_mistakes,
)
from verl.utils.logging import escape_control_characters, setup_logging
from verl.utils.progress import Progress
from verl.utils.seeds import derive_seed

REWARD_TOLERANCE = 1e-6  # tolerance of rewards, for floating-point error
COMPLETE_STOP_REASON = "stop"  # stop reason of a turn that was not truncated


def derive_environment_seed(row: dict[str, Any], run_seed: int) -> int:
    """Derive the environment seed of a row from its group's name, such as ``train-3-0-5``.

    Raises ``ValueError`` if the name does not have this form.
    """
    uid = str(row["uid"])
    if uid.startswith("panel-"):
        return derive_seed("panel", row["task_id"], "env") & SEED_MASK
    split, *seed_numbers = uid.split("-")
    if len(seed_numbers) != 3 or not all(number.isdigit() for number in seed_numbers):
        raise ValueError(f"group {uid!r}: the environment seed cannot be derived from this name")
    return derive_seed(run_seed, split, *map(int, seed_numbers)) & SEED_MASK


async def replay_trajectory(
    pool: EnvironmentPool, task: Task, seed: int, trajectory: dict[str, Any]
) -> str:
    """Execute the stored actions again. Return the first difference from the turns, or ""."""
    try:
        async with pool.open_session() as env:
            return await _compare_turns(env, task, seed, trajectory)
    except EnvFailure as failure:
        return str(failure)


async def _compare_turns(
    env: PoolSession, task: Task, seed: int, trajectory: dict[str, Any]
) -> str:
    reward_sum, is_success = 0.0, False
    observed_text = (await env.reset(task, seed)).text
    for step in trajectory["steps"]:
        if observed_text != step["observation"]:
            return f"observation of turn {step['step']} differs"
        if step["stop_reason"] != COMPLETE_STOP_REASON:
            break
        observation, reward, _, info = await env.step(step["action"])
        observed_text, is_success = observation.text, bool(info.get("won", False))
        reward_sum += reward
        if abs(reward - step["reward"]) > REWARD_TOLERANCE:
            return f"reward of turn {step['step']} was {step['reward']:g}, now {reward:g}"
    if is_success != bool(trajectory["won"]):
        return f"success was {bool(trajectory['won'])}, now {is_success}"
    if abs(reward_sum - trajectory["return"]) > REWARD_TOLERANCE:
        return f"return was {trajectory['return']:g}, now {reward_sum:g}"
    return ""


def read_env_section(run: Path) -> Mapping[str, Any]:
    """Return the section ``env`` of the run's ``config.yaml``. Raises ``UsageError`` without it."""
    path = run / "config.yaml"
    env_section = read_yaml_mapping(path).get("env")
    required_keys = {"env_name", "max_steps", "seed"}
    if not isinstance(env_section, Mapping) or not required_keys <= env_section.keys():
        raise UsageError(
            f"{path}: no section env of a run; allowed: {', '.join(sorted(required_keys))}",
            "missing_key",
        )
    return env_section


async def verify_rewards(
    run: Path, files: Sequence[Path], limit: int | None
) -> tuple[int, list[str]]:
    """Replay trajectories of ``files``; return their number, and a line for each that differs.

    ``limit``: the largest number of trajectories per file.
    """
    env_section = read_env_section(run)
    with convert_read_errors(run / "config.yaml"):
        env_name = canonicalize_env_name(env_section["env_name"])
        kwargs = {
            **(env_section.get(env_name.partition("/")[0]) or {}),
            **(env_section.get("kwargs") or {}),
        }
        settings = read_env_settings(
            EnvConfig(
                env_name=env_name,
                kwargs=kwargs,
                max_steps=env_section["max_steps"],
                seed=env_section["seed"],
            )
        )
        package = get_package(env_name)
    if package.runs_agent:
        raise SystemExit(
            f"{run}: env.env_name={env_name}: trajectories of agents call the policy themselves "
            "and cannot be replayed from their stored actions"
        )
    all_tasks = [task for split in ("train", "val") for task in package.tasks(settings, split)]
    task_by_id = {task["task_id"]: task for task in all_tasks}
    pool = EnvironmentPool(env_name, settings, placement="process")
    await pool.start()
    differences = []
    progress = Progress("replay", None, "trajectories")
    labelled_trajectories = (
        (f"{file.name} {trajectory['traj_uid']}", trajectory)
        for file in files
        for trajectory in [row for row in read_trajectories(file) if not row.get("aborted")][:limit]
    )
    try:
        for label, trajectory in labelled_trajectories:
            progress.add_done()
            task_id = trajectory["task_id"]
            if task_id not in task_by_id:
                differences.append(f"{label}: the task {task_id!r} no longer exists")
                continue
            seed = derive_environment_seed(trajectory, env_section["seed"])
            difference = await replay_trajectory(pool, task_by_id[task_id], seed, trajectory)
            if difference:
                differences.append(f"{label}, {task_id}: {difference}")
    finally:
        progress.close()
        await pool.close()
    return progress.num_done, differences


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit status."""
    parser = argparse.ArgumentParser(description="Replay stored trajectories; report differences.")
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--file", action="append", help="of rollouts/, such as 12 or val_30")
    parser.add_argument("--limit", type=int, help="trajectories of each file, at most")
    parser.add_argument(
        "--trust-run-code", action="store_true", help="execute code that the run's config names"
    )
    args = parser.parse_args(argv)
    setup_logging()
    file_names = args.file or ["*"]
    has_config = (args.run / "config.yaml").is_file()
    if has_config and not args.trust_run_code:
        env_section = read_env_section(args.run)
        refuse_code_in_stored_config({"env": env_section}, str(args.run), fix="--trust-run-code")
    rollout_files = sorted(
        path
        for name in file_names
        for path in (args.run / "rollouts").glob(f"{name.removesuffix('.jsonl')}.jsonl")
    )
    if not rollout_files or not has_config:
        raise UsageError(
            f"{args.run}: no config.yaml, or no rollouts/{'|'.join(file_names)}.jsonl",
            "missing_file",
        )
    num_trajectories, differences = asyncio.run(verify_rewards(args.run, rollout_files, args.limit))
    lines = [*differences, f"{num_trajectories} trajectories, {len(differences)} differ"]
    print(escape_control_characters("\n".join(lines)))
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(run_and_report_mistakes(main))
