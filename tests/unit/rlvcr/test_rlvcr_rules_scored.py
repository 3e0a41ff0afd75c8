"""Tests of the rules for edge cases of RLVCR that need a model.

The docstring of ``test_rlvcr_rules`` lists the rules.

The trajectories of both history policies are scored by a tiny actor. The expected values come from
plain forward passes over the text of the conversation (``Reference``). Rules 7 and 10 are also
tested in reverse: requests for the wrong tokens must make the same comparison fail.
"""

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agent_system.environments.pool.environment_pool import PoolSession
from agent_system.environments.tasks import GroupMismatch
from agent_system.multi_turn_rollout.rollout_loop import TrajectoryCollector
from rlvcr.settings import get_rlvcr_settings
from tests.helpers.policy_rows import actor_of
from tests.helpers.thinking_trajectories import (
    ACTIONS,
    STEPS,
    Reference,
    answer_score_requests,
    collect,
    list_trajectories,
    real_tokens,
    steps_of,
    thinking_config,
    thinking_script,
    thought_of,
)
from tests.helpers.tiny_model import make_tiny_policy, make_tiny_tokenizer
from tests.helpers.trainer_fakes import make_fake_run
from verl.models import attention_calls
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
    """Return the references, which use plain forward passes, by history policy."""
    return {history: Reference(model, tokenizer, history) for history in ("append", "window")}


class Scorer:
    """The real scoring pass. ``corrupt`` changes the request; ``request`` keeps the last one."""

    def __init__(self, worker, corrupt=None) -> None:
        self.worker, self.corrupt, self.request = worker, corrupt, None

    def __call__(self, data):
        self.request = data
        if self.corrupt is not None:
            data = DataProto(data.batch, copy.deepcopy(data.non_tensor_batch), data.meta_info)
            self.corrupt(data)
        return self.worker.compute_log_prob(data)


@pytest.fixture(scope="module")
def scorer(policy):
    return Scorer(actor_of(policy))


@pytest.fixture(scope="module")
def scored_rows(tokenizer, scorer):
    """Return scored rows by history policy."""
    return {
        history: collect(tokenizer, scorer, thinking_config(history))
        for history in ("append", "window")
    }


def advantages(data, config):
    """Return the rows with advantages, where the first member of each group succeeds."""
    last = data.batch["response_mask"].cumsum(-1).argmax(-1)
    rewards = torch.zeros(data.batch["response_mask"].shape)
    rewards[torch.arange(len(data)), last] = torch.tensor(
        [uid.endswith("/0") * 1.0 for uid in traj_uids(data)]
    )
    data.batch["token_level_rewards"] = rewards
    return compute_advantage(data, config)


def traj_uids(data):
    return list(data.non_tensor_batch["traj_uid"])


# ------------------------------------------------------- rules 3, 4, 5: scored turns


@both
def test_unparsed_turn_gets_no_thinking_advantage(history, tokenizer, scorer):
    plain_script = thinking_script()

    def script(request, prompt):
        reply = plain_script(request, prompt)
        is_unparsed = prompt.count("You are at") == 2 and not prompt.endswith("<think>")
        return reply.replace("<level>", "", 1) if is_unparsed else reply

    config = thinking_config(history, combine="additive")
    data = advantages(collect(tokenizer, scorer, config, script), config)
    width = data.batch["responses"].shape[1]
    for row, record in steps_of(data):
        start = int(data.batch["attention_mask"][row][:-width].sum())
        of_turn = slice(record.span[0] - start, record.span[1] - start)
        actual, trajectory = (
            data.batch["advantages"][row][of_turn],
            data.batch["returns"][row][of_turn],
        )
        assert (trajectory.abs() == 0.5).all()
        if record.step == 1:
            assert record.parse_failure == "missing_level" and record.contexts == ()
            assert record.think_advantage == 0.0 and actual.equal(trajectory)
        else:
            assert len(record.contexts) == 4 and not actual.equal(trajectory)


@both
def test_empty_thought_is_scored_like_any_other(history, scored_rows, references, tokenizer):
    data = scored_rows[history]
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
    assert max(references[history].differences(data)) < EXACT  # includes the empty thoughts
    credit, responses = data.batch["thinking_level_entropies"], data.batch["responses"]
    for row, record, context in empty:
        if context.original:
            credited = credit[row][
                (data.batch["step_ids"][row] == record.step) & (credit[row] != 0)
            ]
            digit = responses[row][
                (data.batch["step_ids"][row] == record.step) & (credit[row] != 0)
            ]
            assert tokenizer.decode(digit) == str(record.level) and credited.item() != 0


@both
def test_score_is_a_mean_for_any_action_length(history, scored_rows, scorer, tokenizer):
    lengths = {action: len(tokenizer(action)["input_ids"]) for action in ACTIONS}
    assert min(lengths.values()) == 1 and max(lengths.values()) > 6
    data = scored_rows[history]
    scores = scorer.worker.compute_log_prob(
        request_of(data, scorer, tokenizer, history)
    ).non_tensor_batch
    seen_actions = set()
    for row, record in steps_of(data):
        entries = [e for e in scores["branch_scores"][row] if e.step == record.step]
        entries += [e for e in scores["span_scores"][row] if e.step == record.step]
        assert {e.num_tokens for e in entries} == {
            lengths[record.action] + 1
        }  # plus one token of </action>
        seen_actions.add(record.action)
    assert {1, max(lengths.values())} <= {lengths[action] for action in seen_actions}


def request_of(data, scorer, tokenizer, history):
    """Return the scoring request for ``data``."""
    collect(tokenizer, scorer, thinking_config(history))
    assert scorer.request.batch["input_ids"].equal(data.batch["input_ids"])
    return scorer.request


# ------------------------------------------------------- rules 7, 10: actions after thoughts


@both
def test_turn_is_scored_on_its_own_action_tokens(history, scored_rows, references):
    data = scored_rows[history]
    for trajectory in list_trajectories(data).values():
        actions = [record.action for _, record in trajectory]
        assert len(actions) >= 3 and len(set(actions)) == len(actions), (
            "turns of a trajectory have different actions"
        )
        assert all(len(record.contexts) == 4 for _, record in trajectory)
    differences = references[history].differences(data)
    assert len(differences) == 4 * len(steps_of(data)) and max(differences) < EXACT


def score_actions_of_other_turns(data):
    """Replace every branch's action by that of another turn at the same level."""
    branches = data.non_tensor_batch["branches"]
    every = [branch for row in branches for branch in row]
    actions = {(b.step, b.label): b.token_ids[b.target_start :] for b in every}

    def with_other_action(branch):
        action = next(a for (step, _), a in actions.items() if step == (branch.step + 1) % STEPS)
        return branch._replace(token_ids=[*branch.token_ids[: branch.target_start], *action])

    for row in branches:
        row[:] = [with_other_action(branch) for branch in row]


def score_spans_of_other_turns(data):
    """Replace the span of each turn by that of the next turn of the row, or shift the only span."""
    for row in data.non_tensor_batch["spans"]:
        shift = len(row) == 1
        following = zip(row, row[1:] + row[:1], strict=True)
        row[:] = [
            span._replace(start=next_span.start - shift, end=next_span.end - shift)
            for span, next_span in following
        ]


def score_after_other_histories(data):
    """Let every branch follow the row's first token instead of the prompt of its turn."""
    for row in data.non_tensor_batch["branches"]:
        row[:] = [branch._replace(start=1) for branch in row]


def score_without_the_closing_tag(data):
    """Drop the token that distinguishes "cabinet 1" from "cabinet 10"."""
    for row in data.non_tensor_batch["branches"]:
        row[:] = [branch._replace(token_ids=branch.token_ids[:-1]) for branch in row]


@both
@pytest.mark.parametrize(
    "corrupt",
    [
        score_actions_of_other_turns,
        score_spans_of_other_turns,
        score_after_other_histories,
        score_without_the_closing_tag,
    ],
)
def test_wrong_requests_give_other_scores(history, corrupt, references, tokenizer, scorer):
    corrupted = collect(tokenizer, Scorer(scorer.worker, corrupt), thinking_config(history))
    differences = references[history].differences(corrupted)
    affected = (
        len(differences) / 4 if corrupt is score_spans_of_other_turns else len(differences) * 3 / 4
    )
    assert sum(difference > 100 * EXACT for difference in differences) >= 0.6 * affected


@both
def test_scores_change_with_the_thoughts(history, scored_rows, references, tokenizer, scorer):
    """Levels 2 and 4 exchange their thoughts, so only their scores change."""
    swap = {2: 4, 4: 2}
    script = thinking_script(
        lambda level, step, start: thought_of(swap.get(level, level), step, start)
    )
    before, after = (
        scored_rows[history],
        collect(tokenizer, scorer, thinking_config(history), script),
    )
    assert max(references[history].differences(after)) < EXACT
    changed = 0
    for (_, first), (_, second) in zip(steps_of(before), steps_of(after), strict=True):
        assert first.response == second.response
        for old, new in zip(first.contexts, second.contexts, strict=True):
            is_same_thought = old.thought == new.thought
            assert is_same_thought == (old.original or old.level in (1, 3))
            difference = abs(old.scores.logprob - new.scores.logprob)
            assert difference < EXACT if is_same_thought else difference > 100 * EXACT
            changed += not is_same_thought
        assert abs(first.think_advantage - second.think_advantage) > EXACT
    assert changed > len(steps_of(before))


def score_without_thoughts(data):
    """Score every branch as if its thought were empty."""

    def empty(branch):
        # The opening tags are four tokens, the closing tags two.
        ids = [*branch.token_ids[:4], *branch.token_ids[branch.target_start - 2 :]]
        return branch._replace(token_ids=ids, target_start=6)

    for row in data.non_tensor_batch["branches"]:
        row[:] = [empty(branch) for branch in row]


def score_rotated_thoughts(data):
    """Give every level the thought of the next alternative of its turn."""
    for row in data.non_tensor_batch["branches"]:
        following = zip(row, row[1:] + row[:1], strict=True)
        row[:] = [branch._replace(label=next_branch.label) for branch, next_branch in following]


@both
@pytest.mark.parametrize("corrupt", [score_without_thoughts, score_rotated_thoughts])
def test_ignoring_the_thought_gives_other_scores(history, corrupt, references, tokenizer, scorer):
    corrupted = collect(tokenizer, Scorer(scorer.worker, corrupt), thinking_config(history))
    reference, differences = references[history], []
    for trajectory in list_trajectories(corrupted).values():
        records = [record for _, record in trajectory]
        for number, record in enumerate(records):
            for context in (c for c in record.contexts if not c.original and c.thought):
                text = reference.render_conversation(records, number) + reference.thinking(
                    record, context
                )
                expected = reference.measure(text, record.action)["score_logprob"]
                differences.append(abs(expected - context.scores.logprob))
    is_different = [difference > 100 * EXACT for difference in differences]
    assert len(is_different) > STEPS and sum(is_different) >= 0.9 * len(is_different)


# ------------------------------------------------------- rules 8, 11, 12: batches and groups


@both
def test_row_scores_the_same_in_any_packing(
    history, scored_rows, policy, scorer, tokenizer, monkeypatch
):
    request = request_of(scored_rows[history], scorer, tokenizer, history)
    expected = list_numbers(scorer.worker.compute_log_prob(request))

    def check(worker, parts):
        scores = [worker.compute_log_prob(request[part]) for part in parts]
        actual = [numbers for score in scores for numbers in list_numbers(score)]
        for row, (numbers, reference) in enumerate(
            zip(actual, (expected[i] for part in parts for i in part), strict=True)
        ):
            torch.testing.assert_close(numbers, reference, atol=EXACT, rtol=0, msg=f"row {row}")

    rows = list(range(len(request)))
    check(scorer.worker, [[row] for row in rows])
    check(scorer.worker, [rows[::-1]])
    check(actor_of(policy, ppo_micro_batch_size_per_gpu=3), [rows[1::2], rows[::2]])
    check(actor_of(policy, use_dynamic_bsz=True, ppo_max_token_len_per_gpu=700), [rows])
    for block in (1, 10_000):
        monkeypatch.setattr(attention_calls, "CALL_OVERHEAD_PAIRS", block)
        check(scorer.worker, [rows])


def list_numbers(answer):
    """Return one tensor per row: log-probs and entropies of its tokens, and all its scores."""
    rows = []
    for row in range(len(answer)):
        records = [
            *answer.non_tensor_batch["branch_scores"][row],
            *answer.non_tensor_batch["span_scores"][row],
        ]
        flat = [float(value) for record in records for value in record]
        tokens = [answer.batch[key][row] for key in ("old_log_probs", "entropys")]
        rows.append(torch.cat([*tokens, torch.tensor(flat)]))
    return rows


@both
def test_members_of_a_group_share_task_and_start(history, scored_rows):
    data, columns = scored_rows[history], scored_rows[history].non_tensor_batch
    groups: dict[str, set] = {}
    for trajectory in list_trajectories(data).values():
        row, first = trajectory[0]
        groups.setdefault(columns["uid"][row], set()).add(
            (columns["task_id"][row], first.observation)
        )
    assert len(groups) == 2 and all(len(starts) == 1 for starts in groups.values())
    assert len(set.union(*groups.values())) == 2


@both
def test_different_start_is_refused(history, tokenizer, scorer, monkeypatch):
    original, calls = PoolSession.reset, []

    async def reset(self, task, seed):
        calls.append(task)
        return await original(self, {**task, "start": len(calls) % 5}, seed)

    monkeypatch.setattr(PoolSession, "reset", reset)
    with pytest.raises(GroupMismatch):
        collect(tokenizer, scorer, thinking_config(history))


@both
def test_order_padding_and_splits_keep_the_credit(history, tokenizer, scorer):
    config = thinking_config(
        history, combine="reweight", mode="mean_std_norm", score="logprob", cost_coef=0.2
    )
    unscored = collect(tokenizer, None, config)
    every = list(range(len(unscored)))
    whole = advantages(answer_score_requests(unscored[every], scorer, config), config)

    def check(rows, left=0, right=0):
        part = pad(unscored[rows], left, right)
        part = advantages(answer_score_requests(part, scorer, config), config)
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
def test_trainer_and_collector_fill_the_same_columns(history, scored_rows, tokenizer, scorer):
    """The collector fills the columns if it has a scoring worker; otherwise the trainer does."""
    config = thinking_config(history)
    rows = collect(tokenizer, None, config)
    assert "thinking_level_entropies" not in rows.tensor_keys()
    trainer, *_ = make_fake_run()
    workers: Any = trainer.workers
    workers.compute_log_prob = scorer
    collector: Any = TrajectoryCollector(config, tokenizer)
    trainer.collector = collector
    actual = trainer.score(rows)
    expected = scored_rows[history]
    for key in ("old_log_probs", "thinking_level_entropies", "thinking_token_costs", "choice_mask"):
        torch.testing.assert_close(actual.batch[key], expected.batch[key], atol=0, rtol=0)
    assert actual.non_tensor_batch["steps"].tolist() == expected.non_tensor_batch["steps"].tolist()
    assert set(actual.non_tensor_batch) == set(expected.non_tensor_batch)
    assert trainer.metrics["rlvcr/branch_tokens_ratio"] > 0


def pad(data, left, right):
    """Return the rows with more padding before the prompt and after the response."""
    padded = {}
    for key, value in data.batch.items():
        before = left if key in ("input_ids", "attention_mask", "position_ids", "prompts") else 0
        after = 0 if key == "prompts" else right
        filler = -1 if key == "step_ids" else 0
        padded[key] = torch.nn.functional.pad(value, (before, after), value=filler)
    columns = {
        **data.non_tensor_batch,
        "steps": object_array(copy.deepcopy(list(data.non_tensor_batch["steps"]))),
    }
    return DataProto.from_dict(padded, columns, {})


# ------------------------------------------------------- rule 13: forced tags


@both
def test_forced_tags_are_not_scored_or_counted(history, scored_rows, scorer, tokenizer):
    data = scored_rows[history]
    request = request_of(data, scorer, tokenizer, history)
    for row, record in steps_of(data):
        for context in record.contexts:
            assert context.tokens == len(tokenizer(context.thought)["input_ids"])
        tokens = real_tokens(data, row)
        branches = [b for b in request.non_tensor_batch["branches"][row] if b.step == record.step]
        spans = [s for s in request.non_tensor_batch["spans"][row] if s.step == record.step]
        scored_ids = [b.token_ids[b.target_start :] for b in branches]
        scored_ids += [tokens[s.start : s.end] for s in spans]
        assert [tokenizer.decode(ids) for ids in scored_ids] == [record.action + "</action>"] * 4
    # Rows are the same without alternatives, because alternative thoughts are not trained on.
    config = thinking_config(history)
    get_rlvcr_settings(config.algorithm).enable, config.algorithm.adv_estimator = False, "grpo"
    plain = collect(tokenizer, None, config)
    for key in ("input_ids", "attention_mask", "responses", "response_mask", "step_ids"):
        assert plain.batch[key].equal(data.batch[key]), key


def test_level_groups_get_their_prices_from_scored_batches_too(tokenizer, policy):
    config = thinking_config()
    config.algorithm.adv_estimator = "level_groups"
    data = advantages(collect(tokenizer, Scorer(actor_of(policy)), config), config)
    assert data.batch["thinking_group_price"].shape == data.batch["advantages"].shape
