"""Tests of the supervised choice of levels: labels of states and the training data."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from agent_system.environments.expert_protocol import Decision, Thought
from experiments.level_matrix import DecisionState, Policy, PolicyTurn
from experiments.train_level_choice import (
    build_rows,
    find_right_turns,
    parse_arguments,
    train_on_turns,
)
from tests.helpers.tiny_model import make_tiny_policy


class FakePolicy(Policy):
    """Policy for states whose prompt is the required level: actions at this level or above are
    right.

    ``unlucky`` is a prompt whose second sample at each level is wrong.
    """

    def __init__(self, unlucky: str = "") -> None:
        self.unlucky = unlucky
        self.seen: dict[tuple[str, int], int] = {}

    def sample_policy_turns(self, prompts, levels):
        turns = []
        for prompt, level in zip(prompts, levels, strict=True):
            assert level is not None, "all levels are forced"
            count = self.seen[prompt, level] = self.seen.get((prompt, level), 0) + 1
            is_right = level >= int(prompt) and not (prompt == self.unlucky and count == 2)
            turns.append(PolicyTurn(level, "right" if is_right else "wrong", level, (level,)))
        return turns


def make_states(*needs: str) -> list[DecisionState]:
    return [DecisionState(need, "", None, Decision("right")) for need in needs]


def test_state_is_labelled_with_the_lowest_level_that_suffices():
    policy = FakePolicy()
    states = make_states("1", "3", "5", "2")
    turns, tokens = find_right_turns(states, policy, num_samples=2, min_right=2)
    assert [None if turn is None else turn.level for turn in turns] == [1, 3, None, 2]
    # A level is not sampled again after a wrong action, and higher levels are not sampled.
    assert policy.seen["1", 1] == 2 and ("1", 2) not in policy.seen
    assert policy.seen["3", 1] == 1 and policy.seen["3", 3] == 2
    assert tokens == sum(level * count for (_, level), count in policy.seen.items())


def test_one_wrong_sample_excludes_a_level():
    turns, _ = find_right_turns(make_states("2"), FakePolicy(unlucky="2"), 2, min_right=2)
    assert turns == [None]


def test_label_needs_the_required_number_of_right_samples():
    policy = FakePolicy(unlucky="2")
    turns, tokens = find_right_turns(make_states("2", "4", "5"), policy, num_samples=4, min_right=3)
    assert [None if turn is None else turn.level for turn in turns] == [2, 4, None]
    # A level is given up after two wrong samples, and accepted after three right ones.
    assert policy.seen["2", 1] == 2 and policy.seen["2", 2] == 4 and policy.seen["4", 4] == 3
    assert policy.seen["5", 4] == 2 and ("2", 3) not in policy.seen
    assert tokens == sum(level * count for (_, level), count in policy.seen.items())


class FakeEncoder(Policy):
    """Encodes a prompt, which is a number, as this number, and a reply as its bytes."""

    def __init__(self) -> None:
        """Load no model."""

    def encode_prompt(self, prompt: str) -> list[int]:
        return [int(prompt)]

    def encode_reply(self, text: str) -> list[int]:
        return list(text.encode())


def test_rows_have_labels_the_deepest_level_or_random_levels():
    thoughts = {level: Thought(f"t{level}", "right") for level in (1, 2, 3, 4)}
    decision = Decision("right", thoughts=thoughts)
    states = [DecisionState(str(number), "", None, decision) for number in range(2000)]
    turns = [PolicyTurn(2, "right", 9, (2,)) if n % 2 else None for n in range(2000)]
    encoder = FakeEncoder()
    replies = {
        level: list(f"<level>{level}</level><think>t{level}</think><action>right</action>".encode())
        for level in (1, 2, 3, 4)
    }

    labelled = build_rows(states, turns, encoder, 1.0, uses_deepest=True, seed=0)
    assert labelled == [([n], (2,) if n % 2 else replies[4]) for n in range(2000)]
    skipped = build_rows(states, turns, encoder, 1.0, uses_deepest=False, seed=0)
    assert skipped == labelled[1::2]

    mixed = [row for _, row in build_rows(states, turns, encoder, 0.5, uses_deepest=True, seed=0)]
    assert 440 <= mixed[1::2].count((2,)) <= 560
    assert all(200 <= mixed.count(replies[level]) <= 300 for level in (1, 2, 3))
    # Of the 1,000 unsolved states: the half that gets the deepest level, and 1/8 by random levels.
    assert 560 <= mixed[::2].count(replies[4]) <= 690


def test_training_raises_the_probability_of_the_turns(tmp_path):
    directory = str(make_tiny_policy(tmp_path / "policy"))
    rows = [([5, 6, 7], (20, 30)), ([5, 6, 8], (21, 31))] * 64

    def probability(model) -> float:
        with torch.no_grad():
            logits = model(torch.tensor([[5, 6, 7, 20]])).logits[0].softmax(-1)
        return float(logits[2, 20] * logits[3, 30])

    before = probability(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32))
    after = probability(train_on_turns(directory, rows, epochs=20, seed=0))
    assert after > 10 * before


def test_prompts_are_not_trained(tmp_path):
    """Rows with an empty turn have no loss, whatever their prompts are."""
    directory = str(make_tiny_policy(tmp_path / "policy"))
    model = train_on_turns(directory, [([5, 6], (20,)), ([9, 9, 9, 9], ())], epochs=1, seed=0)
    expected = train_on_turns(directory, [([5, 6], (20,))], epochs=1, seed=0)
    for actual, reference in zip(model.parameters(), expected.parameters(), strict=True):
        assert actual.detach().flatten()[:8].tolist() == pytest.approx(
            reference.detach().flatten()[:8].tolist(), abs=1e-5
        )


def test_overrides_may_stand_before_and_after_options(tmp_path):
    args = parse_arguments(
        ["policy", "env.max_steps=4", "--out", str(tmp_path / "new"), "env.relay.doors=4"]
    )
    assert args.overrides == ["env.max_steps=4", "env.relay.doors=4"]
