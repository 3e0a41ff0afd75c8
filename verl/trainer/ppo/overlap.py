"""The next batch is played while the last one is learned from (``trainer.rollout_overlap``).

    trainer   take k ─ start k+1 ─ score, credit, update ─ wait ─ sync ──▶ take k+1 ─▶ ...
    thread            play k+1 ─────────────────────────▶│ gate           score ─▶ rows

So a batch is sampled by the policy before the last update, and engines change weights while nothing
is played but groups that go on over steps (``env.rollout.carry_over``). The trainer's workers are
busy until then: what a collector asks of them waits at a gate, which opens when its batch is taken.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from verl.protocol import DataProto
from verl.trainer.ppo.interfaces import RolloutGroup
from verl.utils.background import BackgroundCall

SCORING = "scoring"  # a part of the collector's timing: all that it asks of the workers


class GatedWorkers:
    """``workers`` whose ``compute_log_prob`` waits until the gate is open.

    ``idle`` is set where a collector has come to the gate: it plays no more.
    """

    def __init__(self, workers: RolloutGroup) -> None:
        self._workers = workers
        self.idle = threading.Event()
        self.gate = threading.Event()
        self.waited_s = 0.0  # at the gate

    @property
    def rollout_workers(self) -> Sequence[Any]:
        """The engines; nobody waits for these."""
        return self._workers.rollout_workers

    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Score rows with the policy as it is after the update."""
        self.idle.set()
        began = time.perf_counter()
        self.gate.wait()
        self.waited_s += time.perf_counter() - began
        return self._workers.compute_log_prob(data)


class _Ahead:
    """One batch that is played ahead."""

    def __init__(self, play: Callable[[RolloutGroup], DataProto], workers: RolloutGroup) -> None:
        self._play = play
        self.workers = GatedWorkers(workers)
        self.rows = BackgroundCall(self._run, "play-ahead")

    def _run(self) -> DataProto:
        try:
            return self._play(self.workers)
        finally:
            self.workers.idle.set()


class Lookahead:
    """At most one batch that is played ahead."""

    def __init__(self) -> None:
        self._ahead: _Ahead | None = None

    def start(self, play: Callable[[RolloutGroup], DataProto], workers: RolloutGroup) -> None:
        """Call ``play`` in a thread, with ``workers`` behind a gate.

        Raises ``RuntimeError`` while another batch has not been taken.
        """
        if self._ahead is not None:
            raise RuntimeError("a batch is played ahead already: take() it first")
        self._ahead = _Ahead(play, workers)

    def wait_for_plays(self) -> None:
        """Return when nothing is played; at once where nothing was started."""
        if self._ahead is not None:
            self._ahead.workers.idle.wait()

    def take(self) -> DataProto | None:
        """Open the gate and return the batch, None where none was started. Raises what playing
        raised.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return None
        ahead.workers.gate.set()
        batch = ahead.rows.result()
        timing = batch.meta_info.get("timing", {})
        if SCORING in timing:  # within which the collector stood at the gate
            timing[SCORING] -= ahead.workers.waited_s
        return batch
