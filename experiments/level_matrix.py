"""Measure the accuracy of a policy at each thinking level, by situation.

A situation is a kind of state that the environment names. For every situation and forced level, the
share of right actions is measured. Complete episodes are run by several rules that fix the level of
each turn. Their success, turns and tokens are measured.

    python experiments/level_matrix.py data/models/relay --config-name relay --out matrix.json
    python experiments/level_matrix.py data/models/quickstart_depth --config-name quickstart_depth

The states come from held-out episodes of the environment's expert, with a share of useless actions
(``--noise``). They are therefore the same for every policy. An action is right if the expert
accepts it. Complete episodes follow four kinds of rules: one fixed level, the required level of
each state, levels that the policy chooses ("free"), and the "oracle". The oracle uses for each
situation the level that was best in the matrix. The headroom is the lead of the oracle over the
best fixed level. The oracle's levels are chosen on the states of the same tasks, so its lead is
slightly too large.

The engine ``hf`` samples tokens at temperature 1. The environment needs an expert, and observations
that name their situation. ``env.history=window`` is required, because states are measured without
their history.
"""

import argparse
import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from transformers import AutoTokenizer

from agent_system.environments.env import Observation, Task
from agent_system.environments.env_registry import get_package, read_env_settings
from agent_system.environments.expert_protocol import Decision, EpisodeStart, Expert, Noise
from agent_system.environments.experts.demonstrations import get_expert
from agent_system.environments.package import EnvPackage
from agent_system.environments.settings import EnvSettings
from agent_system.memory import WindowMemory
from agent_system.tokens.bridge import ChatBridge
from rlvcr.level_metrics import compute_mutual_information
from rlvcr.levels import LEVELS, LevelCodec
from verl.config.schema import PPOConfig
from verl.trainer.launch.extensions import load_config
from verl.utils.commands import UsageError, parse_positive_int, run_and_report_mistakes
from verl.utils.files import atomic_write, require_new_file
from verl.utils.sampling import SamplingRequest, SamplingResult
from verl.utils.seeds import derive_seed
from verl.workers.rollout.hf import HFEngine

FREE = "free"  # the policy chooses its levels
NEEDED = "needed"  # the required level of each state
ORACLE = "oracle"  # the best level of each situation in the matrix
# A situation's oracle level is the one with fewest tokens among those whose accuracy is at most
# this much below the best.
ORACLE_TOLERANCE = 0.01
PARALLEL_EPISODES = 128


@dataclass(frozen=True, slots=True)
class MatrixEnvironment:
    """Environment, its expert, and the limits of history and turns."""

    package: EnvPackage
    settings: EnvSettings
    expert: Expert
    history_length: int
    max_steps: int

    @classmethod
    def from_config(cls, cfg: PPOConfig) -> "MatrixEnvironment":
        """Return the environment of ``cfg``. Raises ``ValueError`` without ``history=window``."""
        env = cfg.env
        if env.history != "window":
            raise ValueError(
                f"env.history={env.history!r}: states are measured without their history; "
                "allowed: window; fix: env.history=window"
            )
        package = get_package(env.env_name)
        expert = get_expert(env.env_name)
        return cls(package, read_env_settings(env), expert, env.history_length, env.max_steps)


@dataclass(frozen=True, slots=True)
class DecisionState:
    """State of an expert episode: its prompt, and the decision of the expert in it."""

    prompt: str
    situation: str
    required_level: int | None  # lowest level that suffices, if the environment knows it
    decision: Decision


@dataclass(frozen=True, slots=True)
class PolicyTurn:
    """A sampled turn: level (None if it cannot be parsed), action, and all tokens."""

    level: int | None
    action: str
    num_tokens: int
    token_ids: tuple[int, ...] = ()


class Policy:
    """The policy in ``directory``, sampled by the engine ``hf`` with the settings of ``cfg``."""

    def __init__(self, cfg: PPOConfig, environment: MatrixEnvironment, directory: str) -> None:
        tokenizer = AutoTokenizer.from_pretrained(directory)
        rollout_config = cfg.actor_rollout_ref.rollout
        self.engine = HFEngine(rollout_config, directory, seed=rollout_config.seed, num_threads=1)
        self.package = environment.package
        self.bridge = ChatBridge(tokenizer)
        self.codec = LevelCodec(tokenizer)
        self.max_tokens = cfg.env.max_turn_tokens or cfg.data.max_response_length
        system_prompt = environment.package.prompts(environment.settings).system(True)
        self.system_messages = (
            [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
        )
        self.num_requests = 0

    def sample_policy_turns(
        self, prompts: Sequence[str], levels: Sequence[int | None]
    ) -> list[PolicyTurn]:
        """Sample a turn for each of ``prompts``, at the level in ``levels``.

        A forced turn begins with the tokens ``<level>k</level><think>`` for its level k. If a level
        is None, the policy samples these tokens too.
        """
        forced_prefixes = [
            [] if level is None else self.codec.prefix_ids[level] for level in levels
        ]
        for number, (prompt, prefix_ids) in enumerate(zip(prompts, forced_prefixes, strict=True)):
            request = SamplingRequest(
                str(number),
                [*self.encode_prompt(prompt), *prefix_ids],
                max_tokens=self.max_tokens - len(prefix_ids),
                stop=self.package.stop,
                seed=derive_seed("level matrix", self.num_requests + number),
            )
            self.engine.add(request)
        self.num_requests += len(prompts)
        results_by_request: dict[int, SamplingResult] = {}
        while self.engine.has_work():
            results_by_request |= {int(result.request_id): result for result in self.engine.step()}
        return [
            self._parse_turn([*prefix_ids, *results_by_request[number].token_ids])
            for number, prefix_ids in enumerate(forced_prefixes)
        ]

    def encode_prompt(self, prompt: str) -> list[int]:
        """Return the tokens of system prompt and ``prompt``."""
        messages = [*self.system_messages, {"role": "user", "content": prompt}]
        return self.bridge.encode_first_prompt(messages)

    def encode_reply(self, text: str) -> list[int]:
        """Return the tokens of a turn with this text."""
        return self.bridge.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _parse_turn(self, token_ids: list[int]) -> PolicyTurn:
        action, _ = self.package.project(self.bridge.decode(token_ids))
        return PolicyTurn(
            self.codec.parse_turn(token_ids).level, action, len(token_ids), tuple(token_ids)
        )


class StepwiseEpisode:
    """An episode of ``task`` that the caller continues by one action at a time."""

    def __init__(self, environment: MatrixEnvironment, task: Task, seed: int) -> None:
        self.environment = environment
        self.env = environment.package.make(environment.settings)
        self.prompts = environment.package.prompts(environment.settings)
        self.memory = WindowMemory(environment.history_length)
        self.first_observation: Observation = self.env.reset(task, seed)
        self.current_observation = self.first_observation
        self.steps = self.tokens = 0
        self.is_success = self.done = False

    @property
    def current_prompt(self) -> str:
        """Prompt of the current state."""
        return self.prompts.window(
            self.first_observation, self.memory.stored_turns(), self.current_observation, True
        )

    def step(self, action: str) -> None:
        """Execute ``action``. The episode ends after at most ``max_steps`` turns."""
        self.memory.add(self.current_observation.text, action)
        self.current_observation, _, done, info = self.env.step(action)
        self.steps += 1
        self.is_success = bool(info["won"])
        self.done = done or self.steps == self.environment.max_steps
        if self.done:
            self.env.close()


def collect_expert_states(
    environment: MatrixEnvironment, tasks: Sequence[Task], noise: float
) -> list[DecisionState]:
    """Return the states of one expert episode per task.

    ``noise`` is the share of useless actions in these episodes.
    """
    states = []
    for number, task in enumerate(tasks):
        seed = derive_seed("level matrix walk", number)
        episode = StepwiseEpisode(environment, task, seed & 0x7FFFFFFF)
        first_observation = episode.first_observation
        # The noisy expert selects the actions that are executed. The exact expert gets the same
        # observations, and its decisions define the right actions.
        noisy_start = EpisodeStart(
            environment.settings, task, first_observation, random.Random(seed), Noise(noise)
        )
        noisy_expert = environment.expert.start(noisy_start)
        exact_expert = environment.expert.start(
            EpisodeStart(environment.settings, task, first_observation, random.Random(seed))
        )
        while not episode.done:
            right_decision = exact_expert.act()
            observation = episode.current_observation
            states.append(
                DecisionState(
                    episode.current_prompt,
                    observation.situation,
                    observation.needed_level,
                    right_decision,
                )
            )
            action = noisy_expert.act().action
            episode.step(action)
            if not episode.done:
                noisy_expert.observe(action, episode.current_observation)
                exact_expert.observe(action, episode.current_observation)
    return states


def run_episodes(
    environment: MatrixEnvironment,
    policy: Policy,
    tasks: Sequence[Task],
    level_rule: int | str | Mapping[str, int],
) -> list[StepwiseEpisode]:
    """Run one complete episode of ``policy`` per task.

    ``level_rule`` is a fixed level, ``FREE`` (the policy chooses), or ``NEEDED`` (the required
    level of each state). It can also map situations to levels. The policy chooses in situations
    that the mapping lacks.
    """
    finished_episodes = []
    for first_task in range(0, len(tasks), PARALLEL_EPISODES):
        episodes = [
            StepwiseEpisode(
                environment, task, derive_seed("level matrix", first_task, number) & 0x7FFFFFFF
            )
            for number, task in enumerate(tasks[first_task : first_task + PARALLEL_EPISODES])
        ]
        while active_episodes := [episode for episode in episodes if not episode.done]:
            levels = [
                get_forced_level(level_rule, episode.current_observation)
                for episode in active_episodes
            ]
            prompts = [episode.current_prompt for episode in active_episodes]
            sampled_turns = policy.sample_policy_turns(prompts, levels)
            for episode, sampled_turn in zip(active_episodes, sampled_turns, strict=True):
                episode.tokens += sampled_turn.num_tokens
                episode.step(sampled_turn.action)
        finished_episodes += episodes
    return finished_episodes


def get_forced_level(
    level_rule: int | str | Mapping[str, int], observation: Observation
) -> int | None:
    """Return the level that ``level_rule`` forces, or None if the policy chooses it."""
    if isinstance(level_rule, int):
        return level_rule
    if isinstance(level_rule, str):
        return observation.needed_level if level_rule == NEEDED else None
    return level_rule.get(observation.situation)


def choose_oracle_levels(situation_rows: Sequence[dict]) -> dict[str, int]:
    """Return the best thinking level of each situation.

    It is the level with fewest tokens among those whose accuracy is at most ``ORACLE_TOLERANCE``
    below the best. Accuracies 0.3, 0.95, 0.955, 0.955 give level 2 if its turns are shortest.
    """
    level_by_situation = {}
    for row in situation_rows:
        least_accuracy = max(row["accuracy"]) - ORACLE_TOLERANCE
        candidates = [level for level in LEVELS if row["accuracy"][level - 1] >= least_accuracy]
        level_by_situation[row["situation"]] = min(
            candidates, key=lambda level: row["tokens"][level - 1]
        )
    return level_by_situation


def compute_oracle_headroom(episodes: Mapping[str, Mapping[str, float]]) -> dict[str, float | int]:
    """Return the lead of the oracle over the best fixed level, the one with most success.

    ``episodes`` has the mean success, turns and tokens of each rule. In the result, ``points`` is
    the lead in success in percentage points, and ``tokens_pct`` the difference of tokens per turn.
    """
    best_level = max(
        LEVELS, key=lambda level: (episodes[str(level)]["success"], -episodes[str(level)]["tokens"])
    )
    best_level_means, oracle_means = episodes[str(best_level)], episodes[ORACLE]
    best_tokens_per_turn, oracle_tokens_per_turn = (
        means["tokens"] / means["steps"] for means in (best_level_means, oracle_means)
    )
    return {
        "best_level": best_level,
        "points": 100 * (oracle_means["success"] - best_level_means["success"]),
        "tokens_pct": 100 * (oracle_tokens_per_turn / best_tokens_per_turn - 1),
    }


def measure_levels(
    environment: MatrixEnvironment,
    policy: Policy,
    tasks: Sequence[Task],
    noise: float,
    episodes: int | None = None,
) -> dict:
    """Measure ``policy`` in states of the expert, and in complete episodes under each level rule.

    Return all results as a JSON-serializable dict. Complete episodes are run for the first
    ``episodes`` of ``tasks``, or for all if it is None.
    """
    states = collect_expert_states(environment, tasks, noise)
    situation_rows, mean_tokens_by_level = measure_accuracies(states, policy)
    has_required_levels = all(state.required_level is not None for state in states)
    oracle_levels = choose_oracle_levels(situation_rows)
    # The oracle comes last, so that it does not change the samples of the other rules. Samples
    # depend on the number of earlier requests.
    level_rules: dict[str, int | str | Mapping[str, int]] = {
        **{str(level): level for level in LEVELS},
        **({NEEDED: NEEDED} if has_required_levels else {}),
        FREE: FREE,
        ORACLE: oracle_levels,
    }
    episode_tasks = tasks[:episodes]
    episode_means = {
        name: _average_episodes(run_episodes(environment, policy, episode_tasks, level_rule))
        for name, level_rule in level_rules.items()
    }
    return {
        "tasks": len(tasks),
        "noise": noise,
        "states": len(states),
        "situations": situation_rows,
        "tokens_by_level": mean_tokens_by_level,
        "level_information": compute_mutual_information(
            [line["chosen"] for line in situation_rows]
        ),
        "whole_episodes": len(episode_tasks),
        "episodes": episode_means,
        "oracle_levels": oracle_levels,
        "headroom": compute_oracle_headroom(episode_means),
    }


def measure_accuracies(
    states: list[DecisionState], policy: Policy
) -> tuple[list[dict], list[float]]:
    """Return the shares of right actions by situation, and the mean tokens of a turn by level.

    Situations are ordered by their required level.
    """
    prompts = [state.prompt for state in states]
    turns_by_level = {
        level: policy.sample_policy_turns(prompts, [level] * len(prompts)) for level in LEVELS
    }
    free_turns = policy.sample_policy_turns(prompts, [None] * len(prompts))
    required_levels = {state.situation: state.required_level for state in states}
    situation_rows = []
    for situation in sorted(required_levels, key=lambda name: (required_levels[name] or 0, name)):
        state_indices = [
            number for number, state in enumerate(states) if state.situation == situation
        ]
        situation_rows.append(
            {
                "situation": situation,
                "needed": required_levels[situation],
                "states": len(state_indices),
                "accuracy": [
                    _compute_right_share(states, turns_by_level[level], state_indices)
                    for level in LEVELS
                ],
                "tokens": [
                    _mean([turns_by_level[level][number].num_tokens for number in state_indices])
                    for level in LEVELS
                ],
                "free": _compute_right_share(states, free_turns, state_indices),
                "chosen": [
                    sum(free_turns[n].level == level for n in state_indices) for level in LEVELS
                ],
            }
        )
    mean_tokens_by_level = [
        _mean([answer.num_tokens for answer in turns_by_level[level]]) for level in LEVELS
    ]
    return situation_rows, mean_tokens_by_level


def _compute_right_share(
    states: list[DecisionState], answers: list[PolicyTurn], state_indices: list[int]
) -> float:
    return _mean(
        [states[number].decision.is_right(answers[number].action) for number in state_indices]
    )


def _average_episodes(episodes: list[StepwiseEpisode]) -> dict[str, float]:
    return {
        "success": _mean([episode.is_success for episode in episodes]),
        "steps": _mean([episode.steps for episode in episodes]),
        "tokens": _mean([episode.tokens for episode in episodes]),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def compute_half_width(share: float, count: int) -> float:
    """Return half the width of the 95% interval of a share of ``count`` draws.

    It uses the normal approximation. A share of 0.5 of 100 draws gives 1.96 * 0.05 = 0.098.
    """
    return 1.96 * (share * (1 - share) / count) ** 0.5


def print_measurement(measurement: dict) -> None:
    """Print accuracies by situation, means of complete episodes, and the oracle's headroom."""
    num_states = measurement["states"]
    print(f"share of right actions by level in {num_states} states, +- half the 95% interval")
    situation_width = max(
        len(situation_row["situation"]) for situation_row in measurement["situations"]
    )
    for situation_row in measurement["situations"]:
        shares = [*situation_row["accuracy"], situation_row["free"]]
        cells = [
            f"{share:4.2f}+-{compute_half_width(share, situation_row['states']):4.2f}"
            for share in shares
        ]
        required_level = situation_row["needed"] or "-"
        print(
            f"  {situation_row['situation']:{situation_width}} needs {required_level} "
            f"{situation_row['states']:5}  {'  '.join(cells)}  "
            f"oracle {measurement['oracle_levels'][situation_row['situation']]}  "
            f"tokens {' '.join(f'{count:.1f}' for count in situation_row['tokens'])}"
        )
    mutual_information = measurement["level_information"]
    print(f"free choice: {mutual_information:.3f} nats mutual information with situation")
    print(
        "tokens per turn: " + " ".join(f"{count:.1f}" for count in measurement["tokens_by_level"])
    )
    for level_rule, episode_means in measurement["episodes"].items():
        half_width = compute_half_width(episode_means["success"], measurement["whole_episodes"])
        print(
            f"episodes, {level_rule:6}: success {episode_means['success']:.3f}+-{half_width:.3f}, "
            f"{episode_means['steps']:.1f} steps, {episode_means['tokens']:.0f} tokens, "
            f"{episode_means['tokens'] / episode_means['steps']:.2f} per turn"
        )
    headroom = measurement["headroom"]
    if not any(means["success"] for means in measurement["episodes"].values()):
        print("headroom: none can be measured, no episode succeeded under any level rule")
        return
    print(
        f"headroom: oracle minus level {headroom['best_level']}, the best fixed level: success "
        f"{headroom['points']:+.1f} points, tokens per turn {headroom['tokens_pct']:+.1f}%"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("policy", help="directory of the policy (Hugging Face form)")
    parser.add_argument("--config-name", default="relay", help="config of the environment")
    parser.add_argument("--tasks", type=parse_positive_int, default=256, help="held-out episodes")
    parser.add_argument(
        "--episodes", type=parse_positive_int, help="complete episodes per level rule; default: all"
    )
    parser.add_argument(
        "--noise", type=float, default=0.1, help="share of useless actions of the expert"
    )
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    parser.add_argument("overrides", nargs="*", help="key=value of the config")
    args = parser.parse_intermixed_args(argv)
    if not (Path(args.policy) / "config.json").is_file():
        message = f"{args.policy}: it contains no config.json; allowed: the directory of a policy"
        raise UsageError(message, "no_model")
    if args.out is not None:
        require_new_file(args.out, "--out", args.overwrite, "--overwrite")
    cfg = load_config(args.config_name, args.overrides)
    environment = MatrixEnvironment.from_config(cfg)
    tasks = environment.package.tasks(environment.settings, "val")[: args.tasks]
    measurement = measure_levels(
        environment, Policy(cfg, environment, args.policy), tasks, args.noise, args.episodes
    )
    print_measurement(measurement)
    if args.out is not None:
        with atomic_write(args.out) as file:
            file.write(json.dumps(measurement, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_and_report_mistakes(main))
