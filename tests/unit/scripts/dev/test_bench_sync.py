"""Tests of the table and the timing of the weight sync benchmark."""

import pytest

from scripts.dev.bench import sync
from tests.helpers.tiny_model import make_tiny_policy


def test_seconds_are_per_gib_and_relative_to_a_copy():
    line = sync.format_table(
        [sync.SyncCost(sync.GIB // 2, sync_s=3.0, export_s=1.0, copy_s=0.25)]
    ).splitlines()[-1]
    assert line == "| 0.50 | 6.00 | 2.00 | 0.50 | 12.0 |"


def test_first_measurement_is_dropped(monkeypatch):
    moments = iter([0.0, 100.0, 100.0, 101.0, 101.0, 104.0, 104.0, 109.0])
    monkeypatch.setattr(sync.time, "perf_counter", lambda: next(moments))
    calls: list[int] = []
    assert sync.measure_median_s(3, calls.append) == 3.0
    assert calls == [0, 1, 2, 3]


def test_layer_size_equals_that_of_a_model(tmp_path):
    from transformers import AutoModelForCausalLM

    sizes = [
        sum(
            weight.numel()
            for weight in AutoModelForCausalLM.from_pretrained(
                make_tiny_policy(tmp_path / str(layers), hidden=64, layers=layers)
            ).parameters()
        )
        for layers in (1, 2)
    ]
    per_layer = sync.LAYER_WEIGHTS * (64 / 1024) ** 2
    assert sizes[1] - sizes[0] == pytest.approx(per_layer, rel=0.02)
