"""Trajectories per second: the asynchronous collector against a loop in lock-step.

    python scripts/dev/bench/collector.py               # ALFWorld, the policy of the quickstart
    python scripts/dev/bench/collector.py --waiting     # steps that take 10 ms to 1 s
    python scripts/dev/bench/collector.py --tasks 32 --slots 64 env.max_steps=20

Both play the same trajectories with the same engine, which has a process of its own as in a
training run: the same tasks, and every turn sampled with a seed of its own (the last line says how
many trajectories agree in every token). Both have ``--slots`` environments. In lock-step a batch of
trajectories fills them, nobody samples before all have seen the answers of their environments, no
environment steps before the slowest turn is sampled, and the next batch starts when the last
trajectory is over. The two take turns, ``--rounds`` times each, after a round that warms up; the
ratio is of the medians.
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

from agent_system.multi_turn_rollout.collector_worker import Collected, CollectorWorker
from agent_system.multi_turn_rollout.engine_client import TokenSource, call
from agent_system.multi_turn_rollout.play_settings import PlaySettings
from agent_system.multi_turn_rollout.trajectory import Job, Trajectory
from agent_system.multi_turn_rollout.trajectory_player import (
    RolloutContext,
    TrajectoryPlayer,
    gather_or_cancel,
)
from scripts.dev.bench.play import Workload
from verl.utils.sampling import SamplingResult

WAITING = [
    "env.env_name=scripts.dev.bench.waiting:PACKAGE",
    "env.kwargs={}",
    "env.max_steps=16",
    "env.max_turn_tokens=64",
]


class LockStepSource:
    """Passes requests on when everyone who still plays has asked, and results back when all of them
    are there.
    """

    def __init__(self, client: TokenSource) -> None:
        self._client = client
        self.playing = 0
        self._asked: list[tuple[asyncio.Future, list[int], dict[str, Any]]] = []
        self._round: asyncio.Task | None = None

    async def sample(self, prompt_ids: list[int], **request: Any) -> SamplingResult:
        """Wait for the others, then for all results."""
        future = asyncio.get_running_loop().create_future()
        self._asked.append((future, prompt_ids, request))
        self._go_on()
        return await future

    def leave(self) -> None:
        """One trajectory fewer plays."""
        self.playing -= 1
        self._go_on()

    def _go_on(self) -> None:
        # Asked by everyone who still plays: nobody is waited for who has left.
        if self._asked and len(self._asked) == self.playing:
            asked, self._asked = self._asked, []
            self._round = asyncio.ensure_future(self._sample_all(asked))

    async def _sample_all(
        self, asked: list[tuple[asyncio.Future, list[int], dict[str, Any]]]
    ) -> None:
        sampling = (self._client.sample(ids, **request) for _, ids, request in asked)
        # One failure is the failure of one request, as without the gate.
        results = await asyncio.gather(*sampling, return_exceptions=True)
        for (future, _, _), result in zip(asked, results, strict=True):
            if isinstance(result, BaseException):
                future.set_exception(result)
            else:
                future.set_result(result)

    async def close(self) -> None:
        """Close the client."""
        await self._client.close()


class LockStepCollector(CollectorWorker):
    """Plays batches of as many trajectories as there are environments, one batch after the other,
    in lock-step.
    """

    def __init__(self, *args: Any, slots: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._slots = slots
        self._gate = LockStepSource(self._engine)
        self._engine = self._gate

    async def collect(self, jobs: Sequence[Job], settings: PlaySettings) -> Collected:
        """As the asynchronous collector does."""
        collected = Collected([], 0.0, 0.0)
        for start in range(0, len(jobs), self._slots):
            batch = jobs[start : start + self._slots]
            self._gate.playing = len(batch)
            collected.add(await super().collect(batch, settings))
        return collected

    async def _play_group(self, context: RolloutContext, jobs: list[Job]) -> list[Trajectory]:
        return await gather_or_cancel(self._play_one(context, job) for job in jobs)

    async def _play_one(self, context: RolloutContext, job: Job) -> Trajectory:
        try:
            return await TrajectoryPlayer(context, job).play(self._pool)
        finally:
            # Also after a failure: the others would wait for this trajectory for ever.
            self._gate.leave()


def tokens(trajectories: Sequence[Trajectory]) -> list[list[list[int]]]:
    """The tokens of every ledger of every trajectory."""
    return [[list(ledger.ids) for ledger in trajectory.ledgers] for trajectory in trajectories]


async def measure(work: Workload, slots: int, rounds: int) -> dict[str, Any]:
    """Seconds of every round of both collectors; what they played last; how many agree in every
    round.
    """
    collectors = {
        "asynchronous": work.collector(name="async"),
        "lock-step": work.collector(LockStepCollector, name="lock", slots=slots),
    }
    seconds: dict[str, list[float]] = {name: [] for name in collectors}
    same = 0
    played: dict[str, list[Trajectory]] = {}
    for number in range(rounds + 1):
        # Other seeds in every round, the same ones for both collectors.
        jobs = work.apart(f"round {number}")
        for name in collectors if number % 2 else reversed(collectors):
            began = time.perf_counter()
            played[name] = (await collectors[name].collect(jobs, work.settings)).trajectories
            seconds[name].append(time.perf_counter() - began)
        if number:
            same += sum(a == b for a, b in zip(*map(tokens, played.values()), strict=True))
    for collector in collectors.values():
        await collector.close()
    await call(work.engine, "close")
    return {
        "seconds": {name: s[1:] for name, s in seconds.items()},
        "played": played["asynchronous"],
        "same": same,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config-name", default="quickstart")
    parser.add_argument(
        "--waiting",
        action="store_true",
        help="play the environment of scripts/dev/bench/waiting.py",
    )
    parser.add_argument(
        "--tasks", type=int, default=16, help="groups of env.rollout.n trajectories"
    )
    parser.add_argument("--slots", type=int, default=32, help="environments that both have")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args(argv)
    sizes = ["env.num_workers=1", f"env.envs_per_worker={args.slots}"]
    words = [*sizes, *(WAITING if args.waiting else ()), *args.overrides]
    work = Workload(args.config_name, words, args.tasks, actor=True)
    found = asyncio.run(measure(work, args.slots, args.rounds))
    played = found["played"]
    steps = sum(len(trajectory.turns) for trajectory in played)
    print(
        f"{work.cfg.env.env_name}: {len(played)} trajectories, {steps} steps, "
        f"{args.slots} environments"
    )
    for name, seconds in found["seconds"].items():
        each = " ".join(f"{value:.1f}" for value in seconds)
        print(f"{name:12} {len(played) / median(seconds):6.2f} trajectories/s   ({each} s)")
    fast, slow = (median(seconds) for seconds in found["seconds"].values())
    compared = len(played) * args.rounds
    print(
        f"ratio {slow / fast:.2f}; {found['same']} of {compared} trajectories agree in every token"
    )


if __name__ == "__main__":
    main()
