"""Trajectories with different thoughts and actions in each turn, and reference scores of their
contexts.

``Reference`` does not use ledgers, spans or branches. It writes the conversation as text with the
chat template, adds a thought and ``<action>``, and scores the action with a transformers model.
"""

import re
from collections.abc import Callable
from typing import Any

import torch

from agent_system.environments.env import Observation
from agent_system.environments.env_package.number_line.package import (
    LineSettings,
    NumberLinePrompts,
)
from agent_system.multi_turn_rollout.rollout_loop import TrajectoryCollector
from rlvcr.records import SCORE_KEYS, ScoredThought, ThinkingTurnRecord
from rlvcr.scoring import add_level_entropy_bonus, add_score_requests, add_thinking_advantages
from rlvcr.settings import get_rlvcr_settings
from tests.helpers.number_line_world import PLACE, make_config, make_world
from verl.names import History
from verl.protocol import DataProto

LEVEL = re.compile(r"<level>(\d)")
STEPS = 4
ACTIONS = (
    "right",
    "go to desk 12",
    "jump right",
    "look at the mug on cabinet 1",
    "7",
)  # 1 to 12 tokens


def thought_of(level: int, step: int, start: int) -> str:
    """Return the thought at a level in turn ``step`` of a trajectory from position ``start``."""
    return {
        1: "",
        2: f"I am near {start}.",
        3: f"{step} turns, and nothing on the shelf {start}",
        4: f"first the drawer {step}, then the fridge, and the sofa at last" if step != 2 else "",
    }[level]


def level_of(step: int, start: int) -> int:
    """Return the sampled level: each level occurs once in a trajectory of four turns."""
    return 1 + (3 * step + start) % 4


def before_action(level: int, thought: str, gap: str) -> str:
    """Return a turn up to its action, with ``gap`` between its blocks."""
    return f"<level>{level}</level>{gap}<think>{thought}</think>{gap}<action>"


def thinking_script(thought: Callable[[int, int, int], str] = thought_of) -> Callable:
    """Return a script for ``ScriptedEngine`` with trajectories of four turns.

    The turn at level 4 sometimes has an empty thought. If the first position is odd, level,
    thought and action are on separate lines.
    """

    def script(_request: object, prompt: str) -> str:
        places = PLACE.findall(prompt)
        step, start = len(places) - 1, int(places[0][0])
        if prompt.endswith("<think>"):
            return thought(int(LEVEL.findall(prompt)[-1]), step, start) + "</think>"
        level, action = level_of(step, start), ACTIONS[(step + start) % len(ACTIONS)]
        gap = "\n" if start % 2 else ""
        return f"{before_action(level, thought_of(level, step, start), gap)}{action}</action>"

    return script


def thinking_config(history: History = "append", n: int = 2, **rlvcr: Any):
    """Return a config of RLVCR on the number line with values of ``algorithm.rlvcr``.

    A window covers the whole trajectory.
    """
    config = make_config(history=history, levels=True, n=n, max_steps=STEPS, history_length=STEPS)
    config.env.kwargs = {"size": 12}
    config.algorithm.adv_estimator = "rlvcr"
    get_rlvcr_settings(config.algorithm).enable = True
    for key, value in rlvcr.items():
        setattr(get_rlvcr_settings(config.algorithm), key, value)
    return config


def collect(tokenizer, score, config, script: Callable | None = None, groups: int = 2) -> DataProto:
    """Return the rows of one collected batch.

    ``score`` replaces ``compute_log_prob``. Without ``score`` the rows keep their requests for
    scores and get none.
    """
    group, envs, _ = make_world(tokenizer, config, script or thinking_script(), score=score)
    collector = TrajectoryCollector(config, tokenizer)
    try:
        return collector.multi_turn_loop(envs.gen_batch(1, groups), group, envs)
    finally:
        collector.close()


def score_rows(data, steps, compute_log_prob, config, codec) -> DataProto:
    """Add the level bonus and the score requests of the turns ``steps``, and answer the requests.

    Return ``data`` with the columns that the collector and the trainer compute from the scores.
    """
    add_level_entropy_bonus(data, steps, get_rlvcr_settings(config.algorithm), codec)
    add_score_requests(data, steps)
    return answer_score_requests(data, compute_log_prob, config)


def answer_score_requests(data, compute_log_prob, config) -> DataProto:
    """Return ``data`` with the columns computed from the scores that it requests."""
    return add_thinking_advantages(data.union(compute_log_prob(data)), config)


def real_tokens(data: DataProto, row: int) -> list[int]:
    """Return the unpadded tokens of a row."""
    return data.batch["input_ids"][row][data.batch["attention_mask"][row].bool()].tolist()


def steps_of(data: DataProto) -> list[tuple[int, ThinkingTurnRecord]]:
    """Return the row number and the record of every turn."""
    return [
        (row, step) for row, steps in enumerate(data.non_tensor_batch["steps"]) for step in steps
    ]


def list_trajectories(data: DataProto) -> dict[str, list[tuple[int, ThinkingTurnRecord]]]:
    """Return the turns of every trajectory in order, over all of its rows."""
    trajectories: dict[str, list[tuple[int, ThinkingTurnRecord]]] = {}
    for row, step in steps_of(data):
        trajectories.setdefault(data.non_tensor_batch["traj_uid"][row], []).append((row, step))
    return trajectories


class Reference:
    """Scores of ``model`` for an action after a thought, from the text of the conversation."""

    def __init__(self, model, tokenizer, history: str) -> None:
        self.model, self.tokenizer, self.history = model.eval(), tokenizer, history
        self.prompts = NumberLinePrompts(LineSettings())
        self._known: dict[tuple[str, str], dict[str, float]] = {}

    def render_conversation(self, records: list[ThinkingTurnRecord], step: int) -> str:
        """Return the conversation before the response of turn ``step``, as text."""
        messages = [{"role": "system", "content": self.prompts.system(True)}]
        seen = [Observation(record.observation) for record in records]
        if self.history == "window":
            past = [(record.observation, record.action) for record in records[:step]]
            messages.append(
                {"role": "user", "content": self.prompts.window(seen[0], past, seen[step], True)}
            )
        else:
            for number in range(step + 1):
                messages.append({"role": "user", "content": seen[number].text})
                messages.append({"role": "assistant", "content": records[number].response})
            messages.pop()
        return self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )

    def thinking(self, record: ThinkingTurnRecord, context: ScoredThought) -> str:
        """Return the text between the conversation and the action in one of a turn's contexts."""
        if context.original:
            return record.response.partition("<action>")[0] + "<action>"
        gap = "\n" if "</level>\n" in record.response else ""
        return before_action(context.level, context.thought, gap)

    def measure(self, before: str, action: str) -> dict[str, float]:
        """Return the four scores of ``action`` and its closing token, after ``before``."""
        if (before, action) not in self._known:
            self._known[before, action] = self._measure(before, action)
        return self._known[before, action]

    @torch.no_grad()
    def _measure(self, before: str, action: str) -> dict[str, float]:
        ids = self._ids(before)
        targets = self._ids(action + "</action>")
        logits = self.model(torch.tensor([ids + targets])).logits[0].float()
        log_probs = logits[len(ids) - 1 : -1].log_softmax(-1)
        chosen = log_probs.gather(-1, torch.tensor(targets)[:, None])[:, 0]
        return {
            "score_logprob": chosen.mean().item(),
            "score_entropy": -(log_probs.exp() * log_probs).sum(-1).mean().item(),
            "score_mean_prob": chosen.exp().mean().item(),
            "score_geometric_prob": chosen.mean().exp().item(),
        }

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def differences(self, data: DataProto) -> list[float]:
        """Return, for every context of every turn, the largest difference of its scores to the
        reference.
        """
        distances_of_contexts = []
        for trajectory in list_trajectories(data).values():
            records = [record for _, record in trajectory]
            for number, record in enumerate(records):
                before = self.render_conversation(records, number)
                for context in record.contexts:
                    expected = self.measure(before + self.thinking(record, context), record.action)
                    distances = []
                    for measure, name in SCORE_KEYS.items():
                        distances.append(abs(getattr(context.scores, measure) - expected[name]))
                    distances_of_contexts.append(max(distances))
        return distances_of_contexts
