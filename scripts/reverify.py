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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
from verl.config.run_code import refuse_stored_code
from verl.config.schema.env import EnvConfig
from verl.config.settings import ConfigError
from verl.utils import jsonl
from verl.utils.commands import (
    UsageError,
    convert_read_errors,
    read_yaml_mapping,
    run_reporting_mistakes,
)
from verl.utils.logging import escape_control_characters, setup_logging
from verl.utils.progress import Progress
from verl.utils.seeds import derive_seed

REWARD_TOLERANCE = 1e-6  # tolerance of rewards, for floating-point error
COMPLETE_STOP_REASON = "stop"  # stop reason of a turn that was not truncated


@dataclass(slots=True)
class LoggedTrajectory:
    """Trajectory of a rollout file.

    ``row`` is the first of its lines in the file. ``steps`` are its turns, in order.
    """

    row: dict[str, Any]
    steps: list[dict[str, Any]] = field(default_factory=list)


def read_logged_trajectories(path: Path) -> Iterator[LoggedTrajectory]:
    """Yield the trajectories of a rollout file that did not fail (column ``aborted``)."""
    trajectories: dict[str, LoggedTrajectory] = {}
    for row in jsonl.read(path):
        if not row.get("aborted"):
            trajectory = trajectories.setdefault(row["traj_uid"], LoggedTrajectory(row))
            trajectory.steps += row["steps"]
    for trajectory in trajectories.values():
        # With window history a row contains a single turn, and the rows are in any order.
        trajectory.steps.sort(key=lambda step: step["step"])
        yield trajectory


def derive_environment_seed(row: dict[str, Any], run_seed: int) -> int:
    """Derive the environment seed of a row from its group's name, such as ``train-3-0-5``.

    Raises ``ValueError`` if the name does not have this form.
    """
    uid = str(row["uid"])
    if uid.startswith("panel-"):
        return derive_seed("panel", row["task_id"], "env") & SEED_MASK
    split, *numbers = uid.split("-")
    if len(numbers) != 3 or not all(number.isdigit() for number in numbers):
        raise ValueError(f"group {uid!r}: the environment seed cannot be derived from this name")
    return derive_seed(run_seed, split, *map(int, numbers)) & SEED_MASK


async def replay_trajectory(
    pool: EnvironmentPool, task: Task, seed: int, trajectory: LoggedTrajectory
) -> str:
    """Execute the stored actions again. Return the first difference from the turns, or ""."""
    try:
        async with pool.open_session() as env:
            return await _compare_turns(env, task, seed, trajectory)
    except EnvFailure as failure:
        return str(failure)


async def _compare_turns(
    env: PoolSession, task: Task, seed: int, trajectory: LoggedTrajectory
) -> str:
    reward_sum, is_success = 0.0, False
    observed_text = (await env.reset(task, seed)).text
    for step in trajectory.steps:
        if observed_text != step["observation"]:
            return f"observation of turn {step['step']} differs"
        if step["stop_reason"] != COMPLETE_STOP_REASON:
            break
        observation, reward, _, info = await env.step(step["action"])
        observed_text, is_success = observation.text, bool(info.get("won", False))
        reward_sum += reward
        if abs(reward - step["reward"]) > REWARD_TOLERANCE:
            return f"reward of turn {step['step']} was {step['reward']:g}, now {reward:g}"
    if is_success != bool(trajectory.row["won"]):
        return f"success was {bool(trajectory.row['won'])}, now {is_success}"
    if abs(reward_sum - trajectory.row["return"]) > REWARD_TOLERANCE:
        return f"return was {trajectory.row['return']:g}, now {reward_sum:g}"
    return ""


def read_env_section(run: Path) -> Mapping[str, Any]:
    """Return the section ``env`` of the run's ``config.yaml``. Raises ``UsageError`` without it."""
    path = run / "config.yaml"
    section = read_yaml_mapping(path).get("env")
    names = {"env_name", "max_steps", "seed"}
    if not isinstance(section, Mapping) or not names <= section.keys():
        raise UsageError(
            f"{path}: no section env of a run; allowed: {', '.join(sorted(names))}", "missing_key"
        )
    return section


async def verify_rewards(
    run: Path, files: Sequence[Path], limit: int | None
) -> tuple[int, list[str]]:
    """Replay trajectories of ``files``; return their number, and a line for each that differs.

    ``limit``: the largest number of trajectories per file.
    """
    section = read_env_section(run)
    with convert_read_errors(run / "config.yaml"):
        name = canonicalize_env_name(section["env_name"])
        kwargs = {**(section.get(name.partition("/")[0]) or {}), **(section.get("kwargs") or {})}
        settings = read_env_settings(
            EnvConfig(
                env_name=name, kwargs=kwargs, max_steps=section["max_steps"], seed=section["seed"]
            )
        )
        package = get_package(name)
    if package.runs_agent:
        raise SystemExit(
            f"{run}: env.env_name={name}: trajectories of agents call the policy themselves and "
            "cannot be replayed from their stored actions"
        )
    all_tasks = [task for split in ("train", "val") for task in package.tasks(settings, split)]
    tasks = {task["task_id"]: task for task in all_tasks}
    pool = EnvironmentPool(name, settings, placement="process")
    await pool.start()
    differences = []
    progress = Progress("replay", None, "trajectories")
    try:
        selected = (
            (file, trajectory)
            for file in files
            for trajectory in list(read_logged_trajectories(file))[:limit]
        )
        for file, trajectory in selected:
            row, trajectory_name = trajectory.row, f"{file.name} {trajectory.row['traj_uid']}"
            progress.add_done()
            if row["task_id"] not in tasks:
                differences.append(
                    f"{trajectory_name}: the task {row['task_id']!r} no longer exists"
                )
                continue
            seed = derive_environment_seed(row, section["seed"])
            difference = await replay_trajectory(pool, tasks[row["task_id"]], seed, trajectory)
            differences += (
                [f"{trajectory_name}, {row['task_id']}: {difference}"] if difference else []
            )
    finally:
        progress.close()
        await pool.close()
    return progress.done, differences


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
    glob_rollouts = (args.run / "rollouts").glob
    config = args.run / "config.yaml"
    if config.is_file() and not args.trust_run_code:
        section = read_env_section(args.run)
        try:
            refuse_stored_code({"env": section}, str(args.run), fix="--trust-run-code")
        except ConfigError as error:
            sys.stderr.write(f"{error}\n")
            return 2
    files = sorted(
        path
        for name in file_names
        for path in glob_rollouts(f"{name.removesuffix('.jsonl')}.jsonl")
    )
    if not files or not (args.run / "config.yaml").is_file():
        sys.stderr.write(
            f"{args.run}: no config.yaml, or no rollouts/{'|'.join(file_names)}.jsonl\n"
        )
        return 2
    count, differences = asyncio.run(verify_rewards(args.run, files, args.limit))
    lines = [*differences, f"{count} trajectories, {len(differences)} differ"]
    print(escape_control_characters("\n".join(lines)))
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(run_reporting_mistakes(main))
