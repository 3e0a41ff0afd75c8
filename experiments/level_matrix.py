"""Measure the accuracy of a policy at each thinking level, by situation.

For every situation and forced level: the share of right actions. For every level rule: success,
length and tokens of complete episodes.

    python experiments/level_matrix.py data/models/relay --config-name relay --out matrix.json
    python experiments/level_matrix.py data/models/quickstart_depth --config-name quickstart_depth

The states come from held-out episodes of the environment's expert, with a share of useless actions
(``--noise``). They are therefore the same for every policy. An action is right if the expert
accepts it. Complete episodes follow three kinds of rules: one fixed level, the required level of
each state, and levels that the policy chooses ("free"). The engine ``hf`` samples
tokens at temperature 1. The environment needs an expert, and observations that name their
situation. ``env.history=window`` is required: a state is then measured without its history.
"""

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from transformers import AutoTokenizer

from agent_system.environments.env import Observation, Task
from agent_system.environments.env_registry import env_settings, get_package
from agent_system.environments.expert_protocol import Decision, EpisodeStart, Expert, Noise
from agent_system.environments.experts.demonstrations import expert_of
from agent_system.environments.package import EnvPackage
from agent_system.environments.settings import EnvSettings
from agent_system.memory import WindowMemory
from agent_system.tokens.bridge import ChatBridge
from rlvcr.level_metrics import mutual_information
from rlvcr.levels import LEVELS, LevelCodec
from verl.config.schema import PPOConfig
from verl.trainer.launch.extensions import load_config
from verl.utils.commands import UsageError, positive_int, run_reporting_mistakes
from verl.utils.files import atomic_write
from verl.utils.sampling import SamplingRequest, SamplingResult
from verl.utils.seeds import derive_seed
from verl.workers.rollout.hf import HFEngine

FREE = "free"  # the policy chooses its levels
NEEDED = "needed"  # the required level of each state
AT_A_TIME = 128  # episodes that run in parallel


@dataclass(frozen=True, slots=True)
class MatrixWorld:
    """Environment, expert and limits of a measurement."""

    package: EnvPackage
    settings: EnvSettings
    expert: Expert
    history_length: int
    max_steps: int

    @classmethod
    def of(cls, cfg: PPOConfig) -> "MatrixWorld":
        """Build it from ``cfg``. Raises ``ValueError`` if ``env.history`` is not ``window``."""
        env = cfg.env
        if env.history != "window":
            raise ValueError(
                f"env.history={env.history!r}: states are measured without their history; "
                "allowed: window; fix: env.history=window"
            )
        package = get_package(env.env_name)
        expert = expert_of(env.env_name)
        return cls(package, env_settings(env), expert, env.history_length, env.max_steps)


@dataclass(frozen=True, slots=True)
class DecisionState:
    """Prompt of a state, its situation and required level, and the decision of the expert."""

    prompt: str
    situation: str
    needed: int | None
    decision: Decision


@dataclass(frozen=True, slots=True)
class SampledStep:
    """A sampled turn: its level (None if it cannot be parsed), action and number of tokens."""

    level: int | None
    action: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Played:
    """Success, turns and sampled tokens of one episode."""

    won: bool
    steps: int
    tokens: int


class Player(Protocol):
    """Protocol of a policy that ``measure_levels`` can measure."""

    def answer(self, prompts: Sequence[str], levels: Sequence[int | None]) -> list[SampledStep]:
        """Sample a turn for each of ``prompts`` at its level. None: the policy chooses a level."""
        ...


class Policy:
    """The policy in ``directory``, sampled by the engine ``hf`` with the settings of ``cfg``."""

    def __init__(self, cfg: PPOConfig, world: MatrixWorld, directory: str) -> None:
        tokenizer = AutoTokenizer.from_pretrained(directory)
        rollout = cfg.actor_rollout_ref.rollout
        self.engine = HFEngine(rollout, directory, seed=rollout.seed, num_threads=1)
        self.package = world.package
        self.bridge = ChatBridge(tokenizer)
        self.codec = LevelCodec(tokenizer)
        self.max_tokens = cfg.env.max_turn_tokens or cfg.data.max_response_length
        system = world.package.prompts(world.settings).system(True)
        self.opening = [] if system is None else [{"role": "system", "content": system}]
        self.asked = 0

    def answer(self, prompts: Sequence[str], levels: Sequence[int | None]) -> list[SampledStep]:
        """Sample a turn for each of ``prompts``. It starts with the tags of a forced level."""
        forced = [[] if level is None else self.codec.prefix_ids[level] for level in levels]
        for number, (prompt, begun) in enumerate(zip(prompts, forced, strict=True)):
            said = [*self.opening, {"role": "user", "content": prompt}]
            request = SamplingRequest(
                str(number),
                [*self.bridge.first_prompt(said), *begun],
                max_tokens=self.max_tokens - len(begun),
                stop=self.package.stop,
                seed=derive_seed("level matrix", self.asked + number),
            )
            self.engine.add(request)
        self.asked += len(prompts)
        results: dict[int, SamplingResult] = {}
        while self.engine.has_work():
            results |= {int(result.request_id): result for result in self.engine.step()}
        return [
            self._read([*begun, *results[number].token_ids]) for number, begun in enumerate(forced)
        ]

    def _read(self, ids: list[int]) -> SampledStep:
        action, _ = self.package.project(self.bridge.decode(ids))
        return SampledStep(self.codec.parse_step(ids).level, action, len(ids))


class StepwiseEpisode:
    """An episode of ``task`` that takes one action at a time."""

    def __init__(self, world: MatrixWorld, task: Task, seed: int) -> None:
        self.world = world
        self.env = world.package.make(world.settings)
        self.prompts = world.package.prompts(world.settings)
        self.memory = WindowMemory(world.history_length)
        self.first: Observation = self.env.reset(task, seed)
        self.now = self.first
        self.steps = self.tokens = 0
        self.won = self.done = False

    @property
    def prompt(self) -> str:
        """The prompt of the current state."""
        return self.prompts.window(self.first, self.memory.turns(), self.now, True)

    def step(self, action: str) -> None:
        """Execute ``action``. The episode also ends at the limit of turns."""
        self.memory.add(self.now.text, action)
        self.now, _, done, info = self.env.step(action)
        self.steps += 1
        self.won = bool(info["won"])
        self.done = done or self.steps == self.world.max_steps
        if self.done:
            self.env.close()


def walk(world: MatrixWorld, tasks: Sequence[Task], noise: float) -> list[DecisionState]:
    """Return the states of the expert's episodes. ``noise`` is the share of useless actions."""
    states = []
    for number, task in enumerate(tasks):
        seed = derive_seed("level matrix walk", number)
        episode = StepwiseEpisode(world, task, seed & 0x7FFFFFFF)
        first = episode.first
        # The first expert acts with noise. The second reads the same and gives the right action.
        begin = EpisodeStart(world.settings, task, first, random.Random(seed), Noise(noise))
        acting = world.expert.start(begin)
        knowing = world.expert.start(EpisodeStart(world.settings, task, first, random.Random(seed)))
        while not episode.done:
            right = knowing.act()
            seen = episode.now
            states.append(DecisionState(episode.prompt, seen.situation, seen.needed_level, right))
            action = acting.act().action
            episode.step(action)
            if not episode.done:
                acting.observe(action, episode.now)
                knowing.observe(action, episode.now)
    return states


def play(world: MatrixWorld, player: Player, tasks: Sequence[Task], how: int | str) -> list[Played]:
    """Run complete episodes of ``player`` at level ``how``, or by the rule ``FREE`` or ``NEEDED``.

    Up to ``AT_A_TIME`` episodes run in parallel.
    """
    played = []
    for start in range(0, len(tasks), AT_A_TIME):
        episodes = [
            StepwiseEpisode(world, task, derive_seed("level matrix", start, number) & 0x7FFFFFFF)
            for number, task in enumerate(tasks[start : start + AT_A_TIME])
        ]
        while going := [episode for episode in episodes if not episode.done]:
            levels = [level_of(how, episode.now.needed_level) for episode in going]
            answers = player.answer([episode.prompt for episode in going], levels)
            for episode, answer in zip(going, answers, strict=True):
                episode.tokens += answer.tokens
                episode.step(answer.action)
        played += [Played(episode.won, episode.steps, episode.tokens) for episode in episodes]
    return played


def level_of(how: int | str, needed: int | None) -> int | None:
    """Return the level to force, or None if the policy chooses."""
    if isinstance(how, int):
        return how
    return needed if how == NEEDED else None


def measure(
    world: MatrixWorld,
    player: Player,
    tasks: Sequence[Task],
    noise: float,
    episodes: int | None = None,
) -> dict:
    """Return all numbers of the script as a JSON-serializable dict; see the module's docstring.

    Complete episodes are run for the first ``episodes`` of ``tasks`` (None: for all).
    """
    states = walk(world, tasks, noise)
    lines, tokens = matrix(states, player)
    told = all(state.needed is not None for state in states)
    ways = [*LEVELS, *([NEEDED] if told else []), FREE]
    whole = tasks[:episodes]
    return {
        "tasks": len(tasks),
        "noise": noise,
        "states": len(states),
        "situations": lines,
        "tokens_by_level": tokens,
        "level_information": mutual_information([line["chosen"] for line in lines]),
        "whole_episodes": len(whole),
        "episodes": {str(how): _reached(play(world, player, whole, how)) for how in ways},
    }


def matrix(states: list[DecisionState], player: Player) -> tuple[list[dict], list[float]]:
    """Return the accuracies of ``player`` by situation, and the mean tokens of a turn by level.

    The situations are ordered by their required level.
    """
    prompts = [state.prompt for state in states]
    answers = {level: player.answer(prompts, [level] * len(prompts)) for level in LEVELS}
    free = player.answer(prompts, [None] * len(prompts))
    needs = {state.situation: state.needed for state in states}
    lines = []
    for situation in sorted(needs, key=lambda name: (needs[name] or 0, name)):
        here = [number for number, state in enumerate(states) if state.situation == situation]
        lines.append(
            {
                "situation": situation,
                "needed": needs[situation],
                "states": len(here),
                "accuracy": [_share_right(states, answers[level], here) for level in LEVELS],
                "free": _share_right(states, free, here),
                "chosen": [sum(free[n].level == level for n in here) for level in LEVELS],
            }
        )
    tokens = [_mean([answer.tokens for answer in answers[level]]) for level in LEVELS]
    return lines, tokens


def _share_right(states: list[DecisionState], answers: list[SampledStep], here: list[int]) -> float:
    return _mean([states[number].decision.accepts(answers[number].action) for number in here])


def _reached(played: list[Played]) -> dict[str, float]:
    return {
        "success": _mean([episode.won for episode in played]),
        "steps": _mean([episode.steps for episode in played]),
        "tokens": _mean([episode.tokens for episode in played]),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def half_width(share: float, count: int) -> float:
    """Return half the width of the 95% interval of a share of ``count`` independent draws.

    Normal approximation: a share of 0.5 of 100 draws gives 1.96 * 0.05 = 0.098.
    """
    return 1.96 * (share * (1 - share) / count) ** 0.5


def show(found: dict) -> None:
    """Print the result of ``measure_levels`` as tables."""
    print(f"share of right actions by level in {found['states']} states, +- half the 95% interval")
    for line in found["situations"]:
        shares = [*line["accuracy"], line["free"]]
        cells = [f"{share:4.2f}+-{half_width(share, line['states']):4.2f}" for share in shares]
        needed = line["needed"] or "-"
        print(f"  {line['situation']:10} needs {needed} {line['states']:5}  {'  '.join(cells)}")
    print(f"free choice: {found['level_information']:.3f} nats mutual information with situation")
    print("tokens per turn: " + " ".join(f"{count:.1f}" for count in found["tokens_by_level"]))
    for how, reached in found["episodes"].items():
        width = half_width(reached["success"], found["whole_episodes"])
        print(
            f"episodes, {how:6}: success {reached['success']:.3f}+-{width:.3f}, "
            f"{reached['steps']:.1f} steps, {reached['tokens']:.0f} tokens"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("policy", help="directory of the policy (Hugging Face form)")
    parser.add_argument("--config-name", default="relay", help="config of the environment")
    parser.add_argument("--tasks", type=positive_int, default=256, help="held-out episodes")
    parser.add_argument(
        "--episodes", type=positive_int, help="complete episodes per level rule; default: all"
    )
    parser.add_argument(
        "--noise", type=float, default=0.1, help="share of useless actions of the expert"
    )
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("overrides", nargs="*", help="key=value of the config")
    args = parser.parse_args(argv)
    if not (Path(args.policy) / "config.json").is_file():
        raise UsageError(
            f"{args.policy}: it contains no config.json; allowed: the directory of a policy"
        )
    cfg = load_config(args.config_name, args.overrides)
    world = MatrixWorld.of(cfg)
    tasks = world.package.tasks(world.settings, "val")[: args.tasks]
    found = measure(world, Policy(cfg, world, args.policy), tasks, args.noise, args.episodes)
    show(found)
    if args.out is not None:
        with atomic_write(args.out) as file:
            file.write(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_reporting_mistakes(main))
