"""Scoring: the requests for a batch and the columns of the scores.

A real tiny model computes the scores in plain forward passes.
"""

import itertools

import pytest
import torch

from agent_system.multi_turn_rollout.rollout_loop import TrajectoryCollector
from rlvcr import scoring
from rlvcr.alternatives import TurnAlternativeThoughts
from rlvcr.levels import PLAIN_FORMAT, LevelCodec
from rlvcr.score_table import RowTurn, ScoredTurns, build_score_requests, build_score_table
from rlvcr.settings import get_rlvcr_settings
from rlvcr.thinking import compute_thinking_advantage
from tests.helpers.naive_scorer import NaiveScorer
from tests.helpers.number_line_world import make_config, make_world, walk
from tests.helpers.tiny_model import make_tiny_policy, make_tiny_tokenizer
from verl.names import History
from verl.records import ScoreResult, SpanRequest


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


@pytest.fixture(scope="module")
def scorer(tmp_path_factory):
    from transformers import AutoModelForCausalLM

    return NaiveScorer(
        AutoModelForCausalLM.from_pretrained(make_tiny_policy(tmp_path_factory.mktemp("policy")))
    )


def collect(
    tokenizer, scorer, history: History = "append", script=None, max_steps: int = 12, **rlvcr
):
    config = make_config(history=history, levels=True, n=2, max_steps=max_steps)
    config.algorithm.adv_estimator = "rlvcr"
    get_rlvcr_settings(config.algorithm).enable = True
    get_rlvcr_settings(config.algorithm).thinking_diversity_w = 0.5
    for key, value in rlvcr.items():
        setattr(get_rlvcr_settings(config.algorithm), key, value)
    group, envs, _ = make_world(tokenizer, config, script, score=scorer)
    collector = TrajectoryCollector(config, tokenizer)
    try:
        return collector.multi_turn_loop(envs.gen_batch(1, 1), group, envs)
    finally:
        collector.close()


@pytest.fixture(scope="module")
def scored(tokenizer, scorer):
    return {history: collect(tokenizer, scorer, history) for history in ("append", "window")}


def unpadded_tokens(data, row: int) -> list[int]:
    return data.batch["input_ids"][row][data.batch["attention_mask"][row].bool()].tolist()


def list_turns(data):
    return [
        (row, turn) for row, steps in enumerate(data.non_tensor_batch["steps"]) for turn in steps
    ]


@pytest.mark.parametrize("history", ["append", "window"])
def test_every_turn_has_four_contexts_for_its_own_action(scored, scorer, tokenizer, history):
    data = scored[history]
    (request,) = [c for c in scorer.calls if c.batch["input_ids"].equal(data.batch["input_ids"])][
        :1
    ]
    for row, turn in list_turns(data):
        assert [context.level for context in turn.contexts] == [1, 2, 3, 4]
        assert [c.level for c in turn.contexts if c.original] == [turn.level]
        tokens = unpadded_tokens(data, row)
        action = turn.action + "</action>"
        for span in (s for s in request.non_tensor_batch["spans"][row] if s.step == turn.step):
            assert tokenizer.decode(tokens[span.start : span.end]) == action
        branches = [b for b in request.non_tensor_batch["branches"][row] if b.step == turn.step]
        assert len(branches) == 3
        for branch in branches:
            assert tokenizer.decode(branch.token_ids[branch.target_start :]) == action
            assert branch.start == turn.span[0]
            prefix = f"<level>{branch.label}</level><think>"
            assert tokenizer.decode(branch.token_ids).startswith(prefix)


def test_different_thoughts_have_different_scores(scored):
    for data in scored.values():
        for _, turn in list_turns(data):
            logprobs = [context.scores.logprob for context in turn.contexts]
            assert len({round(value, 7) for value in logprobs}) == 4
            assert all(
                context.scores.geometric_prob <= context.scores.mean_prob
                for context in turn.contexts
            )
    counts = [len(list_turns(data)) for data in scored.values()]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("history", ["append", "window"])
def test_credit_is_on_level_digit_and_thought_of_its_turn(scored, tokenizer, history):
    data = scored[history]
    width = data.batch["responses"].shape[1]
    credit = data.batch["thinking_level_entropies"]
    assert (
        credit.shape == data.batch["thinking_token_costs"].shape == data.batch["choice_mask"].shape
    )
    for row, turn in list_turns(data):
        prompt = int(data.batch["attention_mask"][row][:-width].sum())
        of_turn = slice(turn.span[0] - prompt, turn.span[1] - prompt)
        credited = data.batch["responses"][row][of_turn][credit[row][of_turn] != 0].tolist()
        thought = next(c.thought for c in turn.contexts if c.original)
        assert tokenizer.decode(credited) == f"{turn.level}{thought}"
        values = set(credit[row][of_turn].tolist()) - {0.0}
        assert len(values) == 1 and values.pop() == pytest.approx(turn.think_advantage)
        digit = data.batch["responses"][row][of_turn][
            data.batch["choice_mask"][row][of_turn].bool()
        ].tolist()
        assert tokenizer.decode(digit) == str(turn.level)
    assert (credit[~data.batch["response_mask"].bool()] == 0).all()
    assert data.batch["choice_mask"].sum() == len(list_turns(data))


def test_advantage_is_the_chosen_score_minus_the_mean(scored):
    for data in scored.values():
        for _, turn in list_turns(data):
            scores = torch.tensor([[-context.scores.entropy for context in turn.contexts]])
            expected = scores[0, turn.level - 1] - scores.mean()
            assert turn.think_advantage == pytest.approx(expected.item(), abs=1e-6)


def test_cost_counts_thought_tokens_and_is_part_of_the_advantage(tokenizer, scorer):
    free = collect(tokenizer, scorer, score="logprob")
    priced = collect(tokenizer, scorer, score="logprob", cost_coef=0.5, cost_max=8)
    for (_, before), (_, after) in zip(list_turns(free), list_turns(priced), strict=True):
        tokens = torch.tensor([[float(c.tokens) for c in before.contexts]])
        scores = torch.tensor([[c.scores.logprob for c in before.contexts]])
        advantage, share = compute_thinking_advantage(
            scores,
            torch.ones(1, 4).bool(),
            torch.tensor([before.level - 1]),
            tokens,
            cost_coef=0.5,
            cost_max=8,
        )
        assert after.think_cost == pytest.approx(share.item(), abs=1e-6)
        assert after.think_advantage == pytest.approx(advantage.item(), abs=1e-5)
        assert after.think_advantage - after.think_cost == pytest.approx(
            before.think_advantage, abs=1e-5
        )


@pytest.mark.parametrize("history", ["append", "window"])
def test_price_shares_are_on_the_credited_tokens(tokenizer, scorer, history):
    data = collect(tokenizer, scorer, history, score="logprob", cost_coef=0.5, cost_max=20)
    credit, shares = data.batch["thinking_level_entropies"], data.batch["thinking_token_costs"]
    assert (
        credit.dtype == shares.dtype == torch.float32
        and credit.shape == data.batch["responses"].shape
    )
    expected = torch.zeros_like(shares)
    for row, turn in list_turns(data):
        credited = (data.batch["step_ids"][row] == turn.step) & (credit[row] != 0)
        expected[row][credited] = turn.think_cost
        for context in turn.contexts:
            assert context.cost == 0.5 * min(context.tokens, 20) / 20
    assert torch.allclose(shares, expected) and (shares > 0).any() and (shares < 0).any()


def test_old_log_probs_are_computed_with_the_scores(scored, scorer, tokenizer):
    data = scored["append"]
    assert {"old_log_probs", "entropys"} <= set(data.batch.keys())
    width = data.batch["responses"].shape[1]
    tokens = unpadded_tokens(data, 0)
    prompt = int(data.batch["attention_mask"][0][:-width].sum())
    log_probs, _ = scorer.measure(tokens, prompt, len(tokens))
    mask = data.batch["response_mask"][0].bool()
    assert torch.allclose(
        data.batch["old_log_probs"][0][mask], log_probs[mask[: len(log_probs)]], atol=1e-5
    )
    bonus = data.meta_info["choice"]
    assert bonus.weight == 0.5 and bonus.name == "level"
    assert [tokenizer.decode([token]) for token in bonus.token_ids] == ["1", "2", "3", "4"]
    assert "scoring" in data.meta_info["timing"]


def test_scoring_metrics_of_a_batch(scored):
    metrics = scored["append"].meta_info["metrics"]
    assert metrics["rlvcr/valid_contexts_mean"] == 4.0
    assert metrics["rlvcr/expanded_steps"] == len(list_turns(scored["append"]))
    assert metrics["rlvcr/score_logprob"] < 0 < metrics["rlvcr/score_entropy"]
    assert metrics["rlvcr/branch_tokens_ratio"] > 0 and metrics["rlvcr/advantage_abs_mean"] > 0
    assert sum(metrics[f"rlvcr/level_share_{level}"] for level in (1, 2, 3, 4)) == pytest.approx(
        1.0
    )
    assert "thinking_reweight" not in set(scored["append"].batch.keys())


def test_unparsed_turn_gets_no_thinking_advantage(tokenizer, scorer):
    data = collect(
        tokenizer,
        scorer,
        script=lambda _request, _prompt: "<think>hm</think><action>right</action>",
    )
    assert (data.batch["thinking_level_entropies"] == 0).all() and data.batch[
        "choice_mask"
    ].sum() == 0
    records = [turn for _, turn in list_turns(data)]
    assert all(turn.contexts == () and turn.parse_failure == "missing_level" for turn in records)
    assert data.meta_info["metrics"]["rlvcr/parse_fail_missing_level"] == 1.0
    assert (data.batch["old_log_probs"] != 0).any()


def test_one_valid_context_gives_zero(tokenizer, scorer):
    data = collect(tokenizer, scorer, step_fraction=0.0)
    assert (data.batch["thinking_level_entropies"] == 0).all()
    assert all(
        len(turn.contexts) == 1 and turn.think_advantage == 0.0 for _, turn in list_turns(data)
    )
    assert data.meta_info["metrics"]["rlvcr/expanded_steps"] == 0.0


def test_price_in_won_charges_only_successes(tokenizer, scorer):
    """The walking policy succeeds within 12 turns and fails if only one is allowed."""
    settings = {"cost_coef": 0.5, "cost_max": 4}
    for price_in, charged in (("all", (True, True)), ("won", (True, False))):
        actual = []
        for max_steps in (12, 1):
            data = collect(tokenizer, scorer, price_in=price_in, max_steps=max_steps, **settings)
            assert data.non_tensor_batch["won"].all() == (max_steps == 12)
            records = [turn for _, turn in list_turns(data)]
            costs = {context.cost > 0 for turn in records for context in turn.contexts}
            shares = bool((data.batch["thinking_token_costs"] != 0).any())
            assert (True in costs) == shares
            actual.append(shares)
        assert tuple(actual) == charged


def test_permuted_credit_has_the_same_values_in_other_turns(tokenizer, scorer):
    plain, permuted = (collect(tokenizer, scorer, permute=permute) for permute in (False, True))
    before = [turn.think_advantage for _, turn in list_turns(plain)]
    after = [turn.think_advantage for _, turn in list_turns(permuted)]
    assert before != after and sorted(before) == pytest.approx(sorted(after))
    repeated = collect(tokenizer, scorer, permute=True)
    assert [turn.think_advantage for _, turn in list_turns(repeated)] == after


def test_permuted_credit_stays_among_equal_outcomes():
    table = ScoredTurns(
        row_indices=[0, 0, 1, 1],
        turns=[],
        level_scores_by_turn=[],
        scores=torch.zeros(4, 4),
        is_valid=torch.ones(4, 4, dtype=torch.bool),
        thought_tokens=torch.zeros(4, 4),
        chosen_columns=torch.zeros(4, dtype=torch.long),
        action_log_probs=torch.zeros(4, 4),
        level_log_probs=torch.zeros(4, 4),
    )
    values = torch.tensor([1.0, 2.0, 3.0, 4.0])
    credit = scoring._BatchCredit(values, values * 10, values * 100)
    won = torch.tensor([True, True, False, False])
    orders = {
        tuple(scoring._permute_credit(credit, table, won, seed).advantage.tolist())
        for seed in range(20)
    }
    assert orders == {(1, 2, 3, 4), (2, 1, 3, 4), (1, 2, 4, 3), (2, 1, 4, 3)}
    permuted = scoring._permute_credit(credit, table, won, 3)
    torch.testing.assert_close(permuted.price_share, permuted.advantage * 10)
    torch.testing.assert_close(permuted.factor, permuted.advantage * 100)

    def list_orders() -> set[tuple[float, ...]]:
        return {
            tuple(scoring._permute_credit(credit, table, won, seed).advantage.tolist())
            for seed in range(20)
        }

    # Two valid contexts are enough for a comparison.
    table.is_valid[2, 2:] = False
    assert list_orders() == orders
    # A turn without a comparison keeps its place: first an unparsed one, then one context alone.
    table.chosen_columns[0] = -1
    assert list_orders() == {(1, 2, 3, 4), (1, 2, 4, 3)}
    table.is_valid[2, 1:] = False
    assert list_orders() == {(1, 2, 3, 4)}


@pytest.mark.parametrize(("share", "warned"), [(0.06, True), (0.04, False)])
def test_many_dropped_thoughts_are_warned_of(caplog, share, warned):
    scoring._warn_about_dropped_thoughts({"rlvcr/dropped_length": share})
    messages = [record.getMessage() for record in caplog.records]
    assert bool(messages) == warned
    assert all("max_alternative_tokens" in message for message in messages)


def test_entropy_bonus_is_the_same_without_thinking_advantage(tokenizer, scorer):
    credited = collect(tokenizer, scorer, thinking_diversity_w=0.25)
    plain = collect(tokenizer, scorer, enable=False, thinking_diversity_w=0.25)
    none = collect(tokenizer, scorer, enable=False, thinking_diversity_w=0.0)
    assert torch.equal(credited.batch["responses"], plain.batch["responses"])
    assert torch.equal(credited.batch["choice_mask"], plain.batch["choice_mask"])
    assert plain.batch["choice_mask"].any()
    assert credited.meta_info["choice"] == plain.meta_info["choice"]
    assert "thinking_level_entropies" not in set(plain.batch.keys())
    assert "choice_mask" not in set(none.batch.keys())


def test_reweight_factors_are_on_the_credited_tokens(tokenizer, scorer):
    data = collect(tokenizer, scorer, combine="reweight")
    factors = data.batch["thinking_reweight"]
    assert ((factors > 0) == (data.batch["thinking_level_entropies"] != 0)).all()


def test_one_alternative_uses_two_contexts(tokenizer, scorer):
    data = collect(tokenizer, scorer, alternatives="one")
    for _, turn in list_turns(data):
        chosen, alternative = sorted(turn.contexts, key=lambda context: not context.original)
        difference = alternative.scores.entropy - chosen.scores.entropy
        assert turn.think_advantage == pytest.approx(0.75 * difference, abs=1e-6)


@pytest.mark.parametrize("history", ["append", "window"])
def test_posterior_columns_equal_plain_forward_passes(tokenizer, scorer, history):
    """The expected values come from plain forward passes over every context."""
    data = collect(tokenizer, scorer, history, credit="posterior", price_in="all", cost_coef=0.4)
    digits = LevelCodec(tokenizer).digit_ids
    request = scorer.calls[-1]
    checked = 0
    for row, record in list_turns(data):
        row_tokens = unpadded_tokens(data, row)
        start = record.span[0]
        branches = [
            branch
            for branch in request.non_tensor_batch["branches"][row]
            if branch.step == record.step
        ]
        digit_position = next(
            b.start for b in branches if list(b.token_ids) == [digits[record.level % 4]]
        )
        offset = len(row_tokens) - (len(row_tokens) - start)
        column = digit_position - int(
            data.batch["attention_mask"][row][: data.batch["prompts"].shape[1]].sum()
        )
        assert row_tokens[digit_position] == digits[record.level - 1] and offset == start
        of_digits = scorer.logits(row_tokens[:digit_position])[-1].log_softmax(-1)[list(digits)]
        torch.testing.assert_close(
            data.batch["choice_old_log_probs"][row, column], of_digits, atol=1e-5, rtol=1e-5
        )
        sums = torch.tensor(
            [context.scores.logprob * context.scores.num_tokens for context in record.contexts]
        )
        posterior = (of_digits + sums).softmax(-1)
        actual = data.batch["choice_posterior"][row, column]
        torch.testing.assert_close(actual, posterior, atol=1e-4, rtol=1e-4)
        prices = torch.tensor([context.cost for context in record.contexts])
        prices = prices - (of_digits.softmax(-1) * prices).sum()
        torch.testing.assert_close(
            data.batch["choice_credit"][row, column], -posterior * prices, atol=1e-5, rtol=1e-4
        )
        # The digit's price is in choice_credit, that of the thought in the usual column.
        assert data.batch["thinking_level_entropies"][row, column] == 0
        if record.thought_tokens:
            later = data.batch["thinking_level_entropies"][row, column + 1 :]
            price = -prices[record.level - 1]
            assert torch.isclose(later, price, atol=1e-5).sum() >= record.thought_tokens
        checked += 1
    assert checked > 4
    metrics = data.meta_info["metrics"]
    assert 0 < metrics["rlvcr/posterior_of_chosen"] < 1 and metrics["rlvcr/posterior_shift"] > 0


def test_posterior_is_zero_without_alternatives(tokenizer, scorer):
    data = collect(tokenizer, scorer, credit="posterior", expand="mixed_groups")
    # All trajectories succeed with the same return, so no thought was sampled.
    assert len({*data.non_tensor_batch["episode_rewards"].tolist()}) == 1
    assert (data.batch["choice_posterior"] == 0).all()
    assert "rlvcr/posterior_of_chosen" not in data.meta_info["metrics"]


@pytest.mark.parametrize("credit", ["scored", "posterior"])
def test_level_group_prices_compare_successes_in_one_state(tokenizer, scorer, credit):
    """Both members of the group walk alike, so only different thoughts give prices other than 0."""
    thoughts = iter(range(1000))

    def script(_request, prompt):
        if prompt.endswith("<think>"):
            return "other</think>"
        thought = "a " * (next(thoughts) % 3)
        return f"<level>2</level><think>{thought}</think><action>{walk(prompt)}</action>"

    combine = "additive" if credit == "posterior" else "success"
    data = collect(
        tokenizer, scorer, script=script, credit=credit, price_in="group", combine=combine
    )
    groups: dict[object, list[tuple[int, int, str]]] = {}
    for row, record in list_turns(data):
        anchor = data.non_tensor_batch["anchor_obs"][row][record.step]
        trajectory = data.non_tensor_batch["traj_uid"][row]
        groups.setdefault(anchor, []).append((row, record.thought_tokens, trajectory))
    column = data.batch["thinking_group_price"]
    checked = 0
    for members in groups.values():
        tokens = torch.tensor([float(count) for _, count, _ in members])
        scale = max(tokens.std(correction=0).item(), 1.0)
        for row, count, trajectory in members:
            other_counts = [float(c) for _, c, t in members if t != trajectory]
            expected = (
                -(count - sum(other_counts) / len(other_counts)) / scale if other_counts else 0.0
            )
            if expected and count:
                assert torch.isclose(column[row], torch.tensor(expected), atol=1e-5).sum() >= count
                checked += 1
    assert checked > 2
    assert data.meta_info["metrics"]["rlvcr/group_price_share"] > 0.5


def test_alternatives_of_successes_give_the_same_credit(tokenizer, scorer):
    """With ``combine=success`` failed trajectories have no credit, so they need no alternatives."""
    calls = {"all": [], "successes": []}

    def make_script(prompts):
        def script(_request, prompt):
            if prompt.endswith("<think>"):
                prompts.append(prompt)
                return "other</think>"
            action = walk(prompt) if "0" in prompt[-40:] or len(prompt) % 2 else "left"
            return f"<level>3</level><think>so</think><action>{action}</action>"

        return script

    batches = {
        expand: collect(
            tokenizer,
            scorer,
            script=make_script(prompts),
            max_steps=4,
            expand=expand,
            combine="success",
        )
        for expand, prompts in calls.items()
    }
    won = torch.tensor(batches["all"].non_tensor_batch["won"].tolist())
    of_all, of_successes = (
        batches[key].batch["thinking_level_entropies"] for key in ("all", "successes")
    )
    assert torch.equal(of_successes[won], of_all[won]) and (of_successes[~won] == 0).all()
    assert len(calls["successes"]) == len(calls["all"]) * won.float().mean()


def test_shared_thoughts_are_sampled_once_for_equal_prompts(tokenizer, scorer):
    prompts: list[str] = []

    def script(_request, prompt):
        if prompt.endswith("<think>"):
            prompts.append(prompt)
            return f"thought {len(prompts)}</think>"
        return f"<level>1</level><think></think><action>{walk(prompt)}</action>"

    data = collect(tokenizer, scorer, "window", script=script, share_thoughts=True)
    assert len(prompts) == len(set(prompts))
    thoughts: dict[str, set[object]] = {}
    for row, record in list_turns(data):
        prompt = tokenizer.decode(unpadded_tokens(data, row)[: record.span[0]])
        thoughts.setdefault(prompt, set()).add(tuple(c.thought for c in record.contexts))
    # Two members walk alike, so there are fewer prompts than turns, each with one set of thoughts.
    assert len(thoughts) < len(list_turns(data)) and all(len(t) == 1 for t in thoughts.values())
    assert len(prompts) == 3 * len(thoughts)
    num_sampled = data.meta_info["metrics"]["rlvcr/alternative_tokens"]
    assert num_sampled == sum(
        len(tokenizer.encode(f"thought {k + 1}</think>")) for k in range(len(prompts))
    )


@pytest.mark.parametrize("share_thoughts", [False, True])
def test_share_of_dropped_thoughts_counts_shared_thoughts_once(tokenizer, scorer, share_thoughts):
    """All thoughts of level 4 are cut, so a third of the sampled thoughts is dropped."""

    def script(_request, prompt):
        if prompt.endswith("<level>4</level><think>"):
            return "long " * 500
        if prompt.endswith("<think>"):
            return "short</think>"
        return f"<level>1</level><think></think><action>{walk(prompt)}</action>"

    data = collect(tokenizer, scorer, "window", script=script, share_thoughts=share_thoughts)
    assert data.meta_info["metrics"]["rlvcr/dropped_length"] == pytest.approx(1 / 3)


def test_turns_that_share_thoughts_share_the_draws(tokenizer, scorer):
    """``step_fraction`` and ``alternatives="one"`` draw once for all turns with equal prompts."""
    levels = itertools.cycle((2, 3))

    def script(_request, prompt):
        if prompt.endswith("<think>"):
            return "thought</think>"
        level = next(levels)
        return f"<level>{level}</level><think>x</think><action>{walk(prompt)}</action>"

    options = {"script": script, "share_thoughts": True, "max_steps": 4}
    data = collect(tokenizer, scorer, "window", step_fraction=0.5, **options)
    numbers: dict[str, set[int]] = {}
    for row, record in list_turns(data):
        prompt = tokenizer.decode(unpadded_tokens(data, row)[: record.span[0]])
        numbers.setdefault(prompt, set()).add(len(record.contexts))
    assert len(numbers) < len(list_turns(data)) and all(len(n) == 1 for n in numbers.values())
    assert set.union(*numbers.values()) == {1, 4}, "some prompts have thoughts, others have none"

    data = collect(tokenizer, scorer, "window", alternatives="one", **options)
    others: dict[str, set[int]] = {}
    for row, record in list_turns(data):
        prompt = tokenizer.decode(unpadded_tokens(data, row)[: record.span[0]])
        (other,) = {context.level for context in record.contexts} - {record.level}
        others.setdefault(prompt, set()).add(other)
    # Turns at another level than the drawn one choose it; those at this level choose another one.
    assert any(len(levels) == 1 for levels in others.values())
    assert all(len(levels) <= 2 for levels in others.values())


def test_shared_thoughts_see_the_action_of_their_own_turn(tokenizer, scorer):
    """With ``action_blind=false`` thoughts are shared by turns with the same action only."""
    actions = itertools.cycle(("left", "right"))

    def script(_request, prompt):
        if prompt.endswith("<think>"):
            action = prompt.rpartition("The action will be: ")[2].partition("\n")[0]
            return f"I go {action}</think>"
        return f"<level>1</level><think></think><action>{next(actions)}</action>"

    options = {"share_thoughts": True, "action_blind": False, "max_steps": 1}
    data = collect(tokenizer, scorer, script=script, **options)
    records = [record for _, record in list_turns(data)]
    assert sorted(record.action for record in records) == ["left", "right"]
    for record in records:
        thoughts = [context.thought for context in record.contexts]
        assert thoughts == ["", *[f"I go {record.action}"] * 3]


def test_level_bonus_has_its_own_column(tokenizer, scorer, monkeypatch):
    monkeypatch.setattr(
        scoring, "compute_level_count_bonus", lambda levels, _: 1.0 + torch.arange(len(levels))
    )
    plain, bonus = collect(tokenizer, scorer), collect(tokenizer, scorer, level_bonus_w=0.5)
    credit = "thinking_level_entropies"
    assert torch.equal(plain.batch[credit], bonus.batch[credit])
    assert "thinking_level_bonus" not in set(plain.batch.keys())
    column, digits = bonus.batch["thinking_level_bonus"], bonus.batch["choice_mask"].bool()
    assert column[digits].tolist() == [0.5 * (1 + turn) for turn in range(len(list_turns(bonus)))]
    assert column[~bonus.batch["response_mask"].bool()].count_nonzero() == 0


def test_turn_without_alternatives_is_scored_by_a_span_alone(tokenizer):
    codec = LevelCodec(tokenizer)
    ids = tokenizer("<level>2</level><think>x</think><action>look</action>")["input_ids"]
    parsed = codec.parse_turn(ids)
    turn = RowTurn(4, 10, ids, parsed)
    thought = RowTurn(5, 30, ids, parsed, TurnAlternativeThoughts([codec.build_empty_thought()]))
    branches, spans = build_score_requests([[turn], [thought], []])
    assert [len(b) for b in branches] == [0, 1, 0] and [len(s) for s in spans] == [1, 1, 0]
    _, (first, last) = parsed.level_and_scored_span
    assert spans[0][0] == SpanRequest(10 + first, 10 + last, step=4, label=2)
    assert branches[1][0].token_ids == [
        *codec.encode_format(PLAIN_FORMAT).empty_thought_ids,
        *ids[first:last],
    ]


def test_score_table_has_a_column_per_level(tokenizer):
    codec = LevelCodec(tokenizer)
    ids = tokenizer("<level>3</level><think>x</think><action>look</action>")["input_ids"]
    turn = RowTurn(
        0, 5, ids, codec.parse_turn(ids), TurnAlternativeThoughts([codec.build_empty_thought()])
    )

    def entry(level, logprob):
        return ScoreResult(
            step=0,
            label=level,
            logprob=logprob,
            entropy=0.0,
            mean_prob=0.0,
            geometric_prob=0.0,
            num_tokens=1,
        )

    table = build_score_table(
        [[], [turn]], [[], [entry(1, -2.0)]], [[], [entry(3, -1.0)]], "logprob"
    )
    assert table.row_indices == [1] and table.chosen_columns.tolist() == [2]
    assert table.scores.tolist() == [[-2.0, 0.0, -1.0, 0.0]]
    assert table.is_valid.tolist() == [[True, False, True, False]]
    assert table.thought_tokens.tolist() == [[0.0, 0.0, 1.0, 0.0]]


def test_actor_scores_equal_plain_forward_passes(tokenizer, scorer):
    from tests.helpers.policy_rows import actor_of

    worker = actor_of(scorer.model.name_or_path)
    for history in ("append", "window"):
        expected = collect(tokenizer, scorer, history)
        actual = collect(tokenizer, worker.compute_log_prob, history)
        for key in ("old_log_probs", "entropys", "thinking_level_entropies"):
            assert torch.allclose(actual.batch[key], expected.batch[key], atol=1e-5), (history, key)
        for (_, actual_turn), (_, expected_turn) in zip(
            list_turns(actual), list_turns(expected), strict=True
        ):
            for context, expected_context in zip(
                actual_turn.contexts, expected_turn.contexts, strict=True
            ):
                assert context.scores.logprob == pytest.approx(
                    expected_context.scores.logprob, abs=1e-5
                )
                assert context.scores.entropy == pytest.approx(
                    expected_context.scores.entropy, abs=1e-5
                )
