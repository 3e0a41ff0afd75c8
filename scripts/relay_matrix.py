"""Measure a policy on the relay: how often its action is right, by what a door asks for and by the
level it is made to think on; and what it reaches when it chooses the level itself.

    python scripts/relay_matrix.py data/models/relay --out data/models/relay/matrix.json
    python scripts/relay_matrix.py data/models/relay_trap --config-name relay_trap

Doors are those of held-out episodes; each is played whatever became of the doors before it. Tokens
are sampled by the engine ``hf`` at temperature 1.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from transformers import AutoTokenizer

from agent_system.environments.base import Task
from agent_system.environments.env_package.relay.doors import Door
from agent_system.environments.env_package.relay.oracle import mean_oracle
from agent_system.environments.env_package.relay.package import PACKAGE
from agent_system.environments.env_package.relay.settings import RelaySettings
from agent_system.environments.env_registry import env_settings
from agent_system.tokens.bridge import ChatBridge
from rlvcr.level_metrics import mutual_information
from rlvcr.levels import LEVELS, LevelCodec
from verl.trainer.config.schema import PPOConfig
from verl.trainer.launch.extensions import load_config
from verl.utils.files import atomic_write
from verl.utils.sampling import SamplingRequest, SamplingResult
from verl.utils.seeds import derive_seed
from verl.workers.rollout.hf import HFEngine

Table = list[list[float]]  # a line for each number of arrows, a column for each level


@dataclass(frozen=True, slots=True)
class Step:
    """One door that was played: arrows asked for, level thought on (None: not readable), whether
    the action was right, tokens of the whole step.
    """

    arrows: int
    level: int | None
    right: bool
    tokens: int


class DoorPlayer(Protocol):
    """Who can be measured."""

    settings: RelaySettings

    def play(self, doors: Sequence[str], level: int | None) -> list[Step]:
        """Every door once, on ``level`` or, with None, on a level of its own choice."""
        ...


class Player:
    """Plays single doors with the policy in ``directory``."""

    def __init__(self, cfg: PPOConfig, directory: str) -> None:
        tokenizer = AutoTokenizer.from_pretrained(directory)
        rollout = cfg.actor_rollout_ref.rollout
        self.engine = HFEngine(rollout, directory, seed=rollout.seed, num_threads=1)
        self.settings = settings_of(cfg)
        self.prompts = PACKAGE.prompts(self.settings)
        self.bridge = ChatBridge(tokenizer)
        self.codec = LevelCodec(tokenizer)
        self.max_tokens = cfg.env.max_turn_tokens or cfg.data.max_response_length

    def play(self, doors: Sequence[str], level: int | None) -> list[Step]:
        """Every door once, on ``level`` or, with None, on the level the policy chooses."""
        forced = [] if level is None else self.codec.prefix_ids[level]
        for number, door in enumerate(doors):
            request = SamplingRequest(
                str(number),
                [*self._prompt(door), *forced],
                max_tokens=self.max_tokens - len(forced),
                stop=PACKAGE.stop,
                seed=derive_seed("relay matrix", number, level),
            )
            self.engine.add(request)
        results: dict[int, SamplingResult] = {}
        while self.engine.has_work():
            results |= {int(result.request_id): result for result in self.engine.step()}
        return [
            self._step(door, [*forced, *results[number].token_ids])
            for number, door in enumerate(doors)
        ]

    def _prompt(self, door: str) -> list[int]:
        seen = PACKAGE.make(self.settings).reset({"doors": [door]}, 0)
        system = self.prompts.system(True)
        opening = [] if system is None else [{"role": "system", "content": system}]
        said = self.prompts.window(seen, [], seen, True)
        return self.bridge.first_prompt([*opening, {"role": "user", "content": said}])

    def _step(self, door: str, ids: list[int]) -> Step:
        env = PACKAGE.make(self.settings)
        env.reset({"doors": [door]}, 0)
        won = env.step(PACKAGE.project(self.bridge.decode(ids))[0])[3]["won"]
        level = self.codec.parse_step(ids).level
        return Step(Door.read(door).hops, level, bool(won), len(ids))


def settings_of(cfg: PPOConfig) -> RelaySettings:
    """The settings of the relay that ``cfg`` plays. Raises ``ValueError`` for another one."""
    settings = env_settings(cfg.env)
    if not isinstance(settings, RelaySettings):
        raise ValueError(f"env.env_name={cfg.env.env_name!r}: this script measures relay alone")
    return settings


def measure(player: DoorPlayer, tasks: Sequence[Task]) -> dict:
    """Everything this script says about a policy; see the module."""
    doors = [door for task in tasks for door in task["doors"]]
    lines = player.settings.hops[-1] + 1
    accuracy: Table = [[] for _ in range(lines)]
    tokens = []
    for level in LEVELS:
        steps = player.play(doors, level)
        tokens.append(sum(step.tokens for step in steps) / len(steps))
        for arrows in range(lines):
            right = [step.right for step in steps if step.arrows == arrows]
            accuracy[arrows].append(sum(right) / len(right))
    free = player.play(doors, None)
    chosen: Table = [[0.0] * len(LEVELS) for _ in range(lines)]
    for step in free:
        if step.level is not None:
            chosen[step.arrows][step.level - 1] += 1
    won = [
        all(step.right for step in free[start : start + player.settings.doors])
        for start in range(0, len(free), player.settings.doors)
    ]
    return {
        "tasks": len(tasks),
        "accuracy": accuracy,
        "tokens_by_level": tokens,
        "free": {
            "success": sum(won) / len(won),
            "accuracy": sum(step.right for step in free) / len(free),
            "tokens_per_step": sum(step.tokens for step in free) / len(free),
            "levels": chosen,
            "level_information": mutual_information(chosen),
        },
        "oracle": asdict(mean_oracle(tasks, accuracy, player.settings.hops)),
    }


def show(found: dict) -> None:
    """The numbers of ``measure`` for the eye."""
    print("right actions by arrows asked for (lines) and level (columns)")
    for arrows, line in enumerate(found["accuracy"]):
        print(f"  {arrows}  " + "  ".join(f"{share:4.2f}" for share in line))
    free = found["free"]
    print(
        f"free: success {free['success']:.3f}, {free['tokens_per_step']:.2f} tokens a step, "
        f"information {free['level_information']:.3f} nats"
    )
    oracle = found["oracle"]
    per_step = oracle["tokens"] / oracle["steps"]
    print(f"oracle: success {oracle['success']:.3f}, {per_step:.2f} tokens a step")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("policy", help="directory of the policy (Hugging Face form)")
    parser.add_argument("--config-name", default="relay", help="whose environment is played")
    parser.add_argument("--tasks", type=int, default=256, help="held-out episodes")
    parser.add_argument("--out", type=Path, help="JSON file that the numbers are written to")
    parser.add_argument("overrides", nargs="*", help="key=value of the config")
    args = parser.parse_args(argv)
    cfg = load_config(args.config_name, args.overrides)
    player = Player(cfg, args.policy)
    found = measure(player, PACKAGE.tasks(player.settings, "val")[: args.tasks])
    show(found)
    if args.out is not None:
        with atomic_write(args.out) as file:
            file.write(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
