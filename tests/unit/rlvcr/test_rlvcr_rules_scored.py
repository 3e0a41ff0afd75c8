"""The edge rules that need a model: real plays in both history policies, scored by the actor of a
tiny policy.

What is expected comes from plain forwards over the text of the conversation (``Reference``). Rules
7 and 10 are also turned around: scoring that asks for the wrong thing is noticed by the same
comparison.
"""

import copy
from dataclasses import astuple, replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agent_system.environments.manager import GroupMismatch
from agent_system.environments.pool.environment_pool import PoolSession
from agent_system.multi_turn_rollout.rollout_loop import TrajectoryCollector
from rlvcr.settings import method_settings
from tests.helpers.policy_rows import actor_of
from tests.helpers.thinking_plays import (
    ACTIONS,
    STEPS,
    Reference,
    answer_questions,
    collect,
    plays_of,
    real_tokens,
    steps_of,
    thinking_config,
    thinking_script,
    thought_of,
)
from tests.helpers.tiny_model import make_tiny_policy, make_tiny_tokenizer
from tests.helpers.trainer_fakes import make_fake_run
from verl.models import branch_attention
from verl.protocol import DataProto, object_array
from verl.trainer.ppo.ray_trainer import compute_advantage

EXACT = 1e-5
CREDIT = ("thinking_level_entropies", "thinking_token_costs", "thinking_reweight", "choice_mask")
both = pytest.mark.parametrize("history", ["append", "window"])


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"), std=0.2)


@pytest.fixture(scope="module")
def model(policy):
    return AutoModelForCausalLM.from_pretrained(policy)


@pytest.fixture(scope="module")
def references(model, tokenizer):
    """What plain forwards say, by history policy."""
    return {history: Reference(model, tokenizer, history) for history in ("append", "window")}


class Scorer:
    """The real scoring pass. ``twist`` changes what is asked; ``asked`` keeps the last question."""

    def __init__(self, worker, twist=None) -> None:
        self.worker, self.twist, self.asked = worker, twist, None

    def __call__(self, data):
        self.asked = data
        if self.twist is not None:
            data = DataProto(data.batch, copy.deepcopy(data.non_tensor_batch), data.meta_info)
            self.twist(data)
        return self.worker.compute_log_prob(data)


@pytest.fixture(scope="module")
def scorer(policy):
    return Scorer(actor_of(policy))


@pytest.fixture(scope="module")
def played(tokenizer, scorer):
    """Scored rows by history policy."""
    return {
        history: collect(tokenizer, scorer, thinking_config(history))
        for history in ("append", "window")
    }


def advantages(data, config):
    """The rows with advantages: the first play of each group won."""
    last = data.batch["response_mask"].cumsum(-1).argmax(-1)
    rewards = torch.zeros(data.batch["response_mask"].shape)
    rewards[torch.arange(len(data)), last] = torch.tensor(
        [uid.endswith("/0") * 1.0 for uid in traj_uids(data)]
    )
    data.batch["token_level_rewards"] = rewards
    return compute_advantage(data, config)


def traj_uids(data):
    return list(data.non_tensor_batch["traj_uid"])


# ---- 3, 4, 5: which steps are scored, and how --------------------------------------------------


@both
def test_rule_03_an_unparsable_step_keeps_its_trajectory_advantage_and_gets_no_thinking_credit(
    history, tokenizer, scorer
):
    usual = thinking_script()

    def script(request, prompt):
        said = usual(request, prompt)
        broken = prompt.count("You are at") == 2 and not prompt.endswith("<think>")
        return said.replace("<level>", "", 1) if broken else said

    config = thinking_config(history, combine="additive")
    data = advantages(collect(tokenizer, scorer, config, script), config)
    width = data.batch["responses"].shape[1]
    for row, record in steps_of(data):
        start = int(data.batch["attention_mask"][row][:-width].sum())
        own = slice(record.span[0] - start, record.span[1] - start)
        got, trajectory = data.batch["advantages"][row][own], data.batch["returns"][row][own]
        assert (trajectory.abs() == 0.5).all()
        if record.step == 1:
            assert record.parse_failure == "missing_level" and record.contexts == ()
            assert record.think_advantage == 0.0 and got.equal(trajectory)
        else:
            assert len(record.contexts) == 4 and not got.equal(trajectory)


@both
def test_rule_04_an_empty_thought_is_scored_like_any_other(history, played, references, tokenizer):
    data = played[history]
    empty = [
        (row, record, c)
        for row, record in steps_of(data)
        for c in record.contexts
        if c.thought == ""
    ]
    assert {c.level for _, _, c in empty} == {1, 4} and {c.original for _, _, c in empty} == {
        True,
        False,
    }
    assert all(c.tokens == 0 and c.scores.logprob < 0 < c.scores.entropy for _, _, c in empty)
    assert max(references[history].differences(data)) < EXACT  # those contexts included
    placed, responses = data.batch["thinking_level_entropies"], data.batch["responses"]
    for row, record, context in empty:
        if context.original:
            credited = placed[row][
                (data.batch["step_ids"][row] == record.step) & (placed[row] != 0)
            ]
            digit = responses[row][
                (data.batch["step_ids"][row] == record.step) & (placed[row] != 0)
            ]
            assert tokenizer.decode(digit) == str(record.level) and credited.item() != 0


@both
def test_rule_05_actions_of_one_token_and_of_many_are_scored_by_their_mean(
    history, played, scorer, tokenizer
):
    lengths = {action: len(tokenizer(action)["input_ids"]) for action in ACTIONS}
    assert min(lengths.values()) == 1 and max(lengths.values()) > 6
    data = played[history]
    answer = scorer.worker.compute_log_prob(
        asked_of(data, scorer, tokenizer, history)
    ).non_tensor_batch
    seen = set()
    for row, record in steps_of(data):
        entries = [e for e in answer["branch_scores"][row] if e.step == record.step]
        entries += [e for e in answer["span_scores"][row] if e.step == record.step]
        assert {e.num_tokens for e in entries} == {
            lengths[record.action] + 1
        }  # and one token of </action>
        seen.add(record.action)
    assert {1, max(lengths.values())} <= {lengths[action] for action in seen}


def asked_of(data, scorer, tokenizer, history):
    """What scoring was asked about ``data``."""
    collect(tokenizer, scorer, thinking_config(history))
    assert scorer.asked.batch["input_ids"].equal(data.batch["input_ids"])
    return scorer.asked


# ---- 7, 10: the right action after the right thought --------------------------------------------


@both
def test_rule_07_every_step_is_scored_on_its_own_action_tokens(history, played, references):
    data = played[history]
    for play in plays_of(data).values():
        actions = [record.action for _, record in play]
        assert len(actions) >= 3 and len(set(actions)) == len(actions), (
            "steps of a play act differently"
        )
        assert all(len(record.contexts) == 4 for _, record in play)
    differences = references[history].differences(data)
    assert len(differences) == 4 * len(steps_of(data)) and max(differences) < EXACT


def actions_of_other_steps(data):
    """Ask for every branch's action at another step's branch of the same level."""
    branches = data.non_tensor_batch["branches"]
    every = [branch for row in branches for branch in row]
    actions = {(b.step, b.label): b.token_ids[b.target_start :] for b in every}

    def with_other_action(branch):
        other = next(a for (step, _), a in actions.items() if step == (branch.step + 1) % STEPS)
        return replace(branch, token_ids=[*branch.token_ids[: branch.target_start], *other])

    for row in branches:
        row[:] = [with_other_action(branch) for branch in row]


def spans_of_other_steps(data):
    """Measure every original on the action of the row's next step; a row of one step on the tokens
    before it.
    """
    for row in data.non_tensor_batch["spans"]:
        shift = len(row) == 1
        following = zip(row, row[1:] + row[:1], strict=True)
        row[:] = [
            replace(span, start=other.start - shift, end=other.end - shift)
            for span, other in following
        ]


def histories_of_other_steps(data):
    """Let every branch follow the row's first token instead of its own step's prompt."""
    for row in data.non_tensor_batch["branches"]:
        row[:] = [replace(branch, start=1) for branch in row]


def without_the_closing_tag(data):
    """Leave out the token that tells "cabinet 1" from "cabinet 10"."""
    for row in data.non_tensor_batch["branches"]:
        row[:] = [replace(branch, token_ids=branch.token_ids[:-1]) for branch in row]


@both
@pytest.mark.parametrize(
    "twist",
    [
        actions_of_other_steps,
        spans_of_other_steps,
        histories_of_other_steps,
        without_the_closing_tag,
    ],
)
def test_rule_07_scoring_anything_else_would_be_noticed(
    history, twist, references, tokenizer, scorer
):
    wrong = collect(tokenizer, Scorer(scorer.worker, twist), thinking_config(history))
    differences = references[history].differences(wrong)
    affected = len(differences) / 4 if twist is spans_of_other_steps else len(differences) * 3 / 4
    assert sum(difference > 100 * EXACT for difference in differences) >= 0.6 * affected


@both
def test_rule_10_other_thoughts_give_other_scores(history, played, references, tokenizer, scorer):
    """Levels 2 and 4 exchange their thoughts: their scores change, those of the others do not."""
    swap = {2: 4, 4: 2}
    script = thinking_script(
        lambda level, step, start: thought_of(swap.get(level, level), step, start)
    )
    before, after = played[history], collect(tokenizer, scorer, thinking_config(history), script)
    assert max(references[history].differences(after)) < EXACT
    changed = 0
    for (_, first), (_, second) in zip(steps_of(before), steps_of(after), strict=True):
        assert first.response == second.response
        for old, new in zip(first.contexts, second.contexts, strict=True):
            same = old.thought == new.thought
            assert same == (old.original or old.level in (1, 3))
            difference = abs(old.scores.logprob - new.scores.logprob)
            assert difference < EXACT if same else difference > 100 * EXACT
            changed += not same
        assert abs(first.think_advantage - second.think_advantage) > EXACT
    assert changed > len(steps_of(before))


def thoughts_left_out(data):
    """Score every branch as if its thought were empty."""

    def empty(branch):
        # the tags of level and thought are four and two tokens
        ids = [*branch.token_ids[:4], *branch.token_ids[branch.target_start - 2 :]]
        return replace(branch, token_ids=ids, target_start=6)

    for row in data.non_tensor_batch["branches"]:
        row[:] = [empty(branch) for branch in row]


def thoughts_rotated(data):
    """Give every level the thought of the next alternative of its step."""
    for row in data.non_tensor_batch["branches"]:
        following = zip(row, row[1:] + row[:1], strict=True)
        row[:] = [replace(branch, label=other.label) for branch, other in following]


@both
@pytest.mark.parametrize("twist", [thoughts_left_out, thoughts_rotated])
def test_rule_10_scoring_that_ignores_the_thought_would_be_noticed(
    history, twist, references, tokenizer, scorer
):
    wrong = collect(tokenizer, Scorer(scorer.worker, twist), thinking_config(history))
    reference, thinking = references[history], []
    for play in plays_of(wrong).values():
        records = [record for _, record in play]
        for number, record in enumerate(records):
            for context in (c for c in record.contexts if not c.original and c.thought):
                text = reference.said_before(records, number) + reference.thinking(record, context)
                expected = reference.measure(text, record.action)["score_logprob"]
                thinking.append(abs(expected - context.scores.logprob))
    noticed = [difference > 100 * EXACT for difference in thinking]
    assert len(noticed) > STEPS and sum(noticed) >= 0.9 * len(noticed)


# ---------------------------------------------------------------- 8, 11, 12: batches and groups


@both
def test_rule_08_a_row_scores_the_same_alone_and_in_any_packing(
    history, played, policy, scorer, tokenizer, monkeypatch
):
    asked = asked_of(played[history], scorer, tokenizer, history)
    expected = numbers_of(scorer.worker.compute_log_prob(asked))

    def check(worker, parts):
        answers = [worker.compute_log_prob(asked[part]) for part in parts]
        found = [numbers for answer in answers for numbers in numbers_of(answer)]
        for row, (numbers, reference) in enumerate(
            zip(found, (expected[i] for part in parts for i in part), strict=True)
        ):
            torch.testing.assert_close(numbers, reference, atol=EXACT, rtol=0, msg=f"row {row}")

    rows = list(range(len(asked)))
    check(scorer.worker, [[row] for row in rows])
    check(scorer.worker, [rows[::-1]])
    check(actor_of(policy, ppo_micro_batch_size_per_gpu=3), [rows[1::2], rows[::2]])
    check(actor_of(policy, use_dynamic_bsz=True, ppo_max_token_len_per_gpu=700), [rows])
    for block in (1, 10_000):
        monkeypatch.setattr(branch_attention, "BLOCK_QUERIES", block)
        check(scorer.worker, [rows])


def numbers_of(answer):
    """One tensor per row: log-probs and entropies of its sampled tokens, and every number of its
    records.
    """
    rows = []
    for row in range(len(answer)):
        records = [
            *answer.non_tensor_batch["branch_scores"][row],
            *answer.non_tensor_batch["span_scores"][row],
        ]
        flat = [float(value) for record in records for value in astuple(record)]
        tokens = [answer.batch[key][row] for key in ("old_log_probs", "entropys")]
        rows.append(torch.cat([*tokens, torch.tensor(flat)]))
    return rows


@both
def test_rule_11_members_of_a_group_share_task_and_start(history, played):
    data, columns = played[history], played[history].non_tensor_batch
    groups: dict[str, set] = {}
    for play in plays_of(data).values():
        row, first = play[0]
        groups.setdefault(columns["uid"][row], set()).add(
            (columns["task_id"][row], first.observation)
        )
    assert len(groups) == 2 and all(len(starts) == 1 for starts in groups.values())
    assert len(set.union(*groups.values())) == 2


@both
def test_rule_11_another_start_is_refused(history, tokenizer, scorer, monkeypatch):
    original, calls = PoolSession.reset, []

    async def reset(self, task, seed):
        calls.append(task)
        return await original(self, {**task, "start": len(calls) % 5}, seed)

    monkeypatch.setattr(PoolSession, "reset", reset)
    with pytest.raises(GroupMismatch):
        collect(tokenizer, scorer, thinking_config(history))


@both
def test_rule_12_order_padding_and_splits_leave_every_credit_where_it_was(
    history, tokenizer, scorer
):
    config = thinking_config(
        history, combine="reweight", mode="mean_std_norm", score="logprob", cost_coef=0.2
    )
    unscored = collect(tokenizer, None, config)
    every = list(range(len(unscored)))
    whole = advantages(answer_questions(unscored[every], scorer, config), config)

    def check(rows, left=0, right=0):
        part = pad(unscored[rows], left, right)
        part = advantages(answer_questions(part, scorer, config), config)
        for key in (*CREDIT, "advantages"):
            expected = torch.nn.functional.pad(whole.batch[key][rows], (0, right))
            torch.testing.assert_close(
                part.batch[key].float(), expected.float(), atol=EXACT, rtol=0, msg=key
            )

    assert (whole.batch["thinking_reweight"] > 0).any()
    check(every[::-1])
    check(every[1:] + every[:1], left=3, right=5)
    for uid in set(whole.non_tensor_batch["uid"]):
        check([row for row in every if whole.non_tensor_batch["uid"][row] == uid], right=1)


@both
def test_the_trainers_score_gives_what_the_loop_gives_on_its_own(
    history, played, tokenizer, scorer
):
    """Workers that score make the loop fill the columns itself; engines alone leave questions."""
    config = thinking_config(history)
    rows = collect(tokenizer, None, config)
    assert "thinking_level_entropies" not in rows.tensor_keys()
    trainer, *_ = make_fake_run()
    workers: Any = trainer.workers
    workers.compute_log_prob = scorer
    collector: Any = TrajectoryCollector(config, tokenizer)
    trainer.collector = collector
    found = trainer.score(rows)
    expected = played[history]
    for key in ("old_log_probs", "thinking_level_entropies", "thinking_token_costs", "choice_mask"):
        torch.testing.assert_close(found.batch[key], expected.batch[key], atol=0, rtol=0)
    assert found.non_tensor_batch["steps"].tolist() == expected.non_tensor_batch["steps"].tolist()
    assert set(found.non_tensor_batch) == set(expected.non_tensor_batch)
    assert trainer.metrics["rlvcr/branch_tokens_ratio"] > 0


def pad(data, left, right):
    """Rows with more padding before the prompt and behind the response."""
    wide = {}
    for key, value in data.batch.items():
        before = left if key in ("input_ids", "attention_mask", "position_ids", "prompts") else 0
        behind = 0 if key == "prompts" else right
        filler = -1 if key == "step_ids" else 0
        wide[key] = torch.nn.functional.pad(value, (before, behind), value=filler)
    columns = {
        **data.non_tensor_batch,
        "steps": object_array(copy.deepcopy(list(data.non_tensor_batch["steps"]))),
    }
    return DataProto.from_dict(wide, columns, {})


# ---------------------------------------------------------------- 13: what was forced


@both
def test_rule_13_forced_tags_enter_neither_scores_nor_costs_nor_rows(
    history, played, scorer, tokenizer
):
    data = played[history]
    asked = asked_of(data, scorer, tokenizer, history)
    for row, record in steps_of(data):
        for context in record.contexts:
            assert context.tokens == len(tokenizer(context.thought)["input_ids"])
        tokens = real_tokens(data, row)
        branches = [b for b in asked.non_tensor_batch["branches"][row] if b.step == record.step]
        spans = [s for s in asked.non_tensor_batch["spans"][row] if s.step == record.step]
        scored = [b.token_ids[b.target_start :] for b in branches]
        scored += [tokens[s.start : s.end] for s in spans]
        assert [tokenizer.decode(ids) for ids in scored] == [record.action + "</action>"] * 4
    # a play without alternatives has the same rows: what was thought elsewhere is trained on
    # nowhere
    config = thinking_config(history)
    method_settings(config.algorithm).enable, config.algorithm.adv_estimator = False, "grpo"
    plain = collect(tokenizer, None, config)
    for key in ("input_ids", "attention_mask", "responses", "response_mask", "step_ids"):
        assert plain.batch[key].equal(data.batch[key]), key
