"""Tests of derived seeds and of the seeding of a process."""

import random
import subprocess
import sys
from typing import cast

import numpy as np
import pytest
import torch

from tests.helpers.refusals import mentions
from verl.utils.seeds import derive_seed, seed_everything


def test_derived_seed_is_a_known_number():
    assert derive_seed(1, "train", 0) == 7547852364869267844
    assert derive_seed() == derive_seed()


def test_values_and_types_of_all_parts_change_the_seed():
    parts = [(1,), ("1",), (1, 0), (0, 1), ("ab", "c"), ("a", "bc"), (1.0,), (True,), (None,), ()]
    seeds = [derive_seed(*p) for p in parts]
    assert len(set(seeds)) == len(parts)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(np.int64(5)) == derive_seed(5)


def test_seeds_of_consecutive_counters_cover_the_range():
    low_bits = [derive_seed(7, "env", i) & 0x7FFFFFFF for i in range(4000)]
    assert len(set(low_bits)) == len(low_bits)
    assert abs(np.mean(low_bits) / 2**31 - 0.5) < 0.05


def test_objects_are_refused():
    with pytest.raises(TypeError, check=mentions("list")):
        derive_seed(cast(int, [1, 2]))


def test_seed_everything_repeats_all_three_generators():
    def draws():
        seed_everything(derive_seed(3, "process"))
        return random.random(), np.random.rand(), torch.rand(3).tolist()

    assert draws() == draws()


def test_derive_seed_needs_no_torch():
    code = (
        "import sys; from verl.utils.seeds import derive_seed; derive_seed(1); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
