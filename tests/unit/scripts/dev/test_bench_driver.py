"""Tests of the driver benchmarks: their counts and the estimates made from them."""

import gc
from dataclasses import replace

import pytest

from scripts.dev.bench import balance, driver, scale
from scripts.dev.recipes import MODELS
from verl.config.memory import count_micro_batch_tokens
from verl.single_controller.ray.local import stop_ray

SHAPE = driver.TrajectoryShape(turns=3, prompt=6, sampled_tokens=3, observation_tokens=2)


@pytest.fixture(scope="module", autouse=True)
def end_ray():
    """Shut down the Ray that the benchmark starts, so that later tests get their own."""
    yield
    stop_ray()
    gc.unfreeze()


@pytest.fixture(scope="module")
def cost() -> driver.DriverCost:
    return driver.measure_driver_cost(rows=96, ranks=4, shape=SHAPE)


def test_nested_part_is_not_counted_twice(monkeypatch):
    now = iter([0.0, 1.0, 3.0, 10.0, 20.0, 21.0])
    monkeypatch.setattr(driver.time, "process_time", lambda: next(now))
    clock = driver.CpuClock()
    with clock.measure_part("score"), clock.measure_part("send"):
        pass
    with clock.measure_part("score"):
        pass
    assert clock.seconds == {"score": 1.0 + 7.0 + 1.0, "send": 2.0}


def test_every_part_of_a_step_is_measured(cost):
    others = {driver.JOURNAL_PART, driver.COLLECTOR_PART, driver.OTHER_PROCESSES}
    assert set(cost.seconds) == {*driver.BLOCKING_PARTS, *others}
    assert min(cost.seconds.values()) >= 0
    blocking_s = sum(cost.seconds[part] for part in driver.BLOCKING_PARTS)
    assert cost.blocking_ms == pytest.approx(1e3 * blocking_s / 96)


def test_sent_bytes_equal_those_of_the_rows(cost):
    tokens = 96 * SHAPE.row_tokens
    responses = 96 * (SHAPE.row_tokens - SHAPE.prompt)
    # Log-probs and entropies of the policy, log-probs of the reference.
    assert 3 * 4 * responses < cost.sent["answers"] < 3 * 4 * responses + 20_000
    # Sent twice: ids (4 bytes) and mask (1 byte) of the rows, and of their responses.
    sent_tokens = 2 * (4 + 1) * (tokens + responses)
    assert sent_tokens < cost.sent["send"] < sent_tokens + 60_000
    assert cost.sent["update"] > cost.sent["send"] / 2
    # Advantages, entropies and old log-probs.
    assert cost.sent[driver.JOURNAL_PART] > 3 * 4 * responses
    assert cost.sent[driver.JOURNAL_PART] > 96 * 100


def test_costs_are_printed_as_a_table(capsys, tmp_path):
    driver.main(["--rows", "64", "128", "--turns", "2", "--json", str(tmp_path / "costs.json")])
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[2] == "| ms of CPU per row | 64 rows | 128 rows |"
    assert len(lines) == 4 + len(driver.BLOCKING_PARTS) + 3
    assert '"rows": 128' in (tmp_path / "costs.json").read_text()


def test_load_is_computed_from_the_costs():
    model = scale.DriverModel(
        1e-3, 1e-6, 1e-2, 1e-9, 4e-9, received_bytes_per_token=10.0, moved_bytes_per_token=100.0
    )
    load = scale.simulate_step(16, 800, model)
    rows = balance.sample_row_sizes(balance.BalanceCase(16, 800, scale.OPTIMIZER_STEPS))
    padded = 800 * max(rows.sizes)
    assert load.driver_s == pytest.approx(0.8 + padded * 1e-6 + 0.16)
    stored = (10.0 * sum(rows.sizes) + 100.0 * padded) / 1e9
    assert load.store_gb == pytest.approx(stored)
    assert load.driver_link_s == pytest.approx(stored / 2 / scale.DRIVER_LINK_GB_PER_S), "two nodes"
    assert 0.9 < load.efficiency <= 1
    assert load.slowest_part == "devices"
    slow = replace(model, seconds_per_row=1.0)
    assert scale.simulate_step(16, 800, slow).slowest_part == "driver"
    slow_journal = replace(model, journal_seconds_per_token=1.0)
    assert scale.simulate_step(16, 800, slow_journal).slowest_part == "journal"
    assert load.journal_s == pytest.approx(1e-9 * sum(rows.sizes))
    assert load.collector_s == pytest.approx(
        4e-9 * sum(rows.sizes) / (2 * scale.COLLECTORS_PER_NODE)
    )
    slow_collectors = replace(model, collector_seconds_per_token=1.0)
    assert scale.simulate_step(16, 800, slow_collectors).slowest_part == "collectors"
    assert load.idle_share == 0


def test_ranks_without_a_row_are_counted():
    case = balance.BalanceCase(64, 80, scale.OPTIMIZER_STEPS)
    _, _, idle_share = scale.measure_sharding(balance.sample_row_sizes(case), 64, 0)
    # Each of four mini-batches has 20 rows, so 44 of 64 ranks have none.
    assert idle_share == pytest.approx(44 / 64)


def test_weight_shards_are_sent_once_per_micro_batch():
    cfg = scale.make_config(8, 800)
    (name,) = {str(cfg.actor_rollout_ref.model.path)} & set(MODELS)
    weights = MODELS[name].num_parameters
    # Two scoring passes and an update of four steps: forward, backward and gradient.
    once = 2 * 2 * weights + 4 * (2 * 2 + 4) * weights
    assert scale.compute_link_bytes(cfg, 8, 1.0) == pytest.approx(once * 7 / 8)
    many = 10 * count_micro_batch_tokens(cfg)
    whole = 10 * 2 * 2 * weights + 10 * (2 * 2 + 4) * weights
    assert scale.compute_link_bytes(cfg, 8, many) == pytest.approx(whole * 7 / 8)


def test_table_has_a_line_for_every_case(monkeypatch, capsys):
    model = scale.DriverModel(1e-3, 1e-7, 1e-2, 2e-6, 8e-6, 10.0, 100.0)
    monkeypatch.setattr(scale, "fit_driver_model", lambda rows: model)
    scale.main(["--ranks", "8", "16", "--trajectories", "80"])
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[0].startswith("driver: 1.00 ms a row, 100 ns a token of it, 10.00 ms a rank")
    assert [line.split("|")[1].strip() for line in lines[4:]] == ["8", "16"]
