"""Compare trajectories per second of the asynchronous collector and of a loop in lock-step.

    python scripts/dev/bench/collector.py               # ALFWorld, the policy of the quickstart
    python scripts/dev/bench/collector.py --waiting     # steps that take 10 ms to 1 s
    python scripts/dev/bench/collector.py --tasks 32 --slots 64 env.max_steps=20

Both generate the same trajectories with the same engine, which runs in another process as in a
training run. The tasks are the same, and every turn has its own sampling seed. The last line of the
output says how many trajectories have the same tokens. Both have ``--slots`` environments.

In lock-step, a batch of trajectories fills the environments. Sampling starts when all environments
have answered. Environments step when the slowest turn is sampled. The next batch starts when the
last trajectory has ended.

The two collectors alternate for ``--rounds`` rounds, after a warm-up round. The ratio at the end of
the output compares their median times.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from agent_system.multi_turn_rollout.collector_worker import CollectedTrajectories, CollectorWorker
from agent_system.multi_turn_rollout.engine_client import TokenSource, call_worker_method
from agent_system.multi_turn_rollout.rollout_settings import RolloutSettings
from agent_system.multi_turn_rollout.trajectory import RolloutSpec, Trajectory
from agent_system.multi_turn_rollout.trajectory_generator import (
    RolloutContext,
    TrajectoryGenerator,
    gather_or_cancel,
)
from scripts.dev.bench.workload import Workload
from verl.utils.sampling import SamplingResult

WAITING_OVERRIDES = [
    "env.env_name=scripts.dev.bench.waiting:PACKAGE",
    "env.kwargs={}",
    "env.max_steps=16",
    "env.max_turn_tokens=64",
]


class LockStepClient:
    """Engine client that waits until every active trajectory has a request, and sends them all."""

    def __init__(self, client: TokenSource) -> None:
        self._client = client
        self.num_active = 0
        self._requests: list[tuple[asyncio.Future, list[int], dict[str, Any]]] = []
        self._sampling_task: asyncio.Task | None = None

    async def sample(self, prompt_ids: list[int], **request: Any) -> SamplingResult:
        """Sample the next turn."""
        result_future = asyncio.get_running_loop().create_future()
        self._requests.append((result_future, prompt_ids, request))
        self._sample_if_complete()
        return await result_future

    def remove_trajectory(self) -> None:
        """Stop waiting for one trajectory, because it has ended."""
        self.num_active -= 1
        self._sample_if_complete()

    def _sample_if_complete(self) -> None:
        if self._requests and len(self._requests) == self.num_active:
            requests, self._requests = self._requests, []
            self._sampling_task = asyncio.ensure_future(self._sample_all(requests))

    async def _sample_all(
        self, requests: list[tuple[asyncio.Future, list[int], dict[str, Any]]]
    ) -> None:
        sample_calls = (
            self._client.sample(prompt_ids, **request) for _, prompt_ids, request in requests
        )
        # If a request fails, only its own trajectory gets the exception.
        results = await asyncio.gather(*sample_calls, return_exceptions=True)
        for (result_future, _, _), result in zip(requests, results, strict=True):
            if isinstance(result, BaseException):
                result_future.set_exception(result)
            else:
                result_future.set_result(result)

    async def close(self) -> None:
        """Close the engine client that this client wraps."""
        await self._client.close()


class LockStepCollector(CollectorWorker):
    """Collector that generates batches of ``slots`` trajectories in lock-step."""

    def __init__(self, *args: Any, slots: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._slots = slots
        self._lock_step_client = LockStepClient(self._engine)
        self._engine = self._lock_step_client

    async def collect(
        self, specs: Sequence[RolloutSpec], settings: RolloutSettings
    ) -> CollectedTrajectories:
        """Generate the trajectories of ``specs`` in batches of ``slots``."""
        collected = CollectedTrajectories([], 0.0, 0.0)
        for first_spec in range(0, len(specs), self._slots):
            batch_specs = specs[first_spec : first_spec + self._slots]
            self._lock_step_client.num_active = len(batch_specs)
            collected.add(await super().collect(batch_specs, settings))
        return collected

    async def _generate_group(
        self, context: RolloutContext, specs: list[RolloutSpec]
    ) -> list[Trajectory]:
        return await gather_or_cancel(self._generate_trajectory(context, spec) for spec in specs)

    async def _generate_trajectory(self, context: RolloutContext, spec: RolloutSpec) -> Trajectory:
        try:
            return await TrajectoryGenerator(context, spec).generate_trajectory(self._pool)
        finally:
            # Do this after a failure too: otherwise the other trajectories wait forever.
            self._lock_step_client.remove_trajectory()


def list_token_ids(trajectories: Sequence[Trajectory]) -> list[list[list[int]]]:
    """Return the token ids of all rows of each trajectory."""
    return [
        [list(ledger.token_ids) for ledger in trajectory.ledgers] for trajectory in trajectories
    ]


async def measure_collectors(workload: Workload, slots: int, rounds: int) -> dict[str, Any]:
    """Run both collectors for ``rounds`` rounds after a warm-up round.

    Return the seconds of each round, the trajectories of the last round (``trajectories``), and the
    number of trajectories of all rounds with equal tokens (``same``).
    """
    collectors = {
        "asynchronous": workload.make_collector(name="async"),
        "lock-step": workload.make_collector(LockStepCollector, name="lock", slots=slots),
    }
    seconds_by_name: dict[str, list[float]] = {name: [] for name in collectors}
    num_equal_trajectories = 0
    trajectories_by_name: dict[str, list[Trajectory]] = {}
    for round_index in range(rounds + 1):
        # The seeds differ between rounds, and are the same for both collectors.
        rollout_specs = workload.reseed_specs(f"round {round_index}")
        for name in collectors if round_index % 2 else reversed(collectors):
            start_time = time.perf_counter()
            trajectories_by_name[name] = (
                await collectors[name].collect(rollout_specs, workload.settings)
            ).trajectories
            seconds_by_name[name].append(time.perf_counter() - start_time)
        if round_index:
            num_equal_trajectories += sum(
                a == b
                for a, b in zip(*map(list_token_ids, trajectories_by_name.values()), strict=True)
            )
    for collector in collectors.values():
        await collector.close()
    await call_worker_method(workload.engine, "close")
    return {
        "seconds": {name: s[1:] for name, s in seconds_by_name.items()},
        "trajectories": trajectories_by_name["asynchronous"],
        "same": num_equal_trajectories,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark with the command-line options and print its results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config-name", default="quickstart")
    parser.add_argument(
        "--waiting",
        action="store_true",
        help="use the environment of scripts/dev/bench/waiting.py",
    )
    parser.add_argument(
        "--tasks", type=int, default=16, help="groups of env.rollout.n trajectories"
    )
    parser.add_argument("--slots", type=int, default=32, help="environments of each collector")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args(argv)
    size_overrides = ["env.num_workers=1", f"env.envs_per_worker={args.slots}"]
    overrides = [*size_overrides, *(WAITING_OVERRIDES if args.waiting else ()), *args.overrides]
    workload = Workload(args.config_name, overrides, args.tasks, actor=True)
    result = asyncio.run(measure_collectors(workload, args.slots, args.rounds))
    trajectories = result["trajectories"]
    num_turns = sum(len(trajectory.turns) for trajectory in trajectories)
    print(
        f"{workload.cfg.env.env_name}: {len(trajectories)} trajectories, {num_turns} steps, "
        f"{args.slots} environments"
    )
    for name, seconds in result["seconds"].items():
        seconds_text = " ".join(f"{value:.1f}" for value in seconds)
        print(
            f"{name:12} {len(trajectories) / median(seconds):6.2f} trajectories/s   "
            f"({seconds_text} s)"
        )
    asynchronous_s, lock_step_s = (median(seconds) for seconds in result["seconds"].values())
    num_compared = len(trajectories) * args.rounds
    print(
        f"ratio {lock_step_s / asynchronous_s:.2f}; "
        f"{result['same']} of {num_compared} trajectories agree in every token"
    )


if __name__ == "__main__":
    main()
