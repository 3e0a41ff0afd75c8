"""Tests of ``override_config``: trainer and rollout engine build the same config."""

import json

import pytest
from transformers import AutoConfig, Qwen2Config

from tests.helpers.model_families import SIZES
from tests.helpers.refusals import mentions, suggests
from verl.models.loader import read_config
from verl.workers.rollout.engine_registry import make_overridden_model_directory

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
# Override, and the values of the config that differ from those of config.json.
CASES = [
    (WINDOW, WINDOW | {"layer_types": ["full_attention", "sliding_attention"]}),
    ({"rope_scaling": YARN}, {"rope_parameters": YARN | {"rope_theta": 1e6}}),
    ({"rope_theta": 100.0}, {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}),
    (
        {"rope_scaling": YARN, "rope_theta": 100.0},
        {"rope_parameters": YARN | {"rope_theta": 100.0}},
    ),
    ({"hidden_act": "gelu"}, {"hidden_act": "gelu"}),
]


@pytest.fixture(params=["transformers 4", "transformers 5"])
def model_dir(tmp_path, request):
    """Write a ``config.json`` as one of the two major versions of transformers does."""
    rope = {"rope_type": "default", "rope_theta": 1e6}
    Qwen2Config(**SIZES, rope_parameters=rope).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    values = json.loads(file.read_text())
    del values["layer_types"]  # then transformers computes them from the other values
    if request.param == "transformers 4":
        del values["rope_parameters"]
        values["rope_theta"] = 1e6
    file.write_text(json.dumps(values))
    return tmp_path


@pytest.mark.parametrize(("override", "expected"), CASES)
def test_trainer_and_engine_build_the_same_config(model_dir, override, expected):
    plain = read_config(model_dir).to_dict()
    trained = read_config(model_dir, override_config=override).to_dict()
    assert "rope_theta" not in YARN  # transformers adds it to its copy
    engine_directory = make_overridden_model_directory(str(model_dir), override)
    sampled = AutoConfig.from_pretrained(engine_directory).to_dict()
    assert trained == sampled | {"_name_or_path": str(model_dir)}
    assert {key: trained[key] for key in trained if trained[key] != plain[key]} == expected


def test_removed_rope_scaling_keeps_the_base(model_dir):
    read_config(model_dir, override_config={"rope_scaling": YARN}).save_pretrained(model_dir)
    config = read_config(model_dir, override_config={"rope_scaling": None})
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ({"hidden_size": "wide"}, ["override_config.hidden_size='wide'"]),
        ({"vocab_size": 64, "hidden_size": "wide"}, ["override_config.hidden_size='wide'"]),
        ({"model_type": "llama"}, ["override_config.model_type='llama'", "qwen2"]),
        ({"rope_scaling": 3}, ["override_config.rope_scaling=3"]),
    ],
)
def test_value_that_the_config_refuses_is_named(model_dir, override, parts):
    with pytest.raises(ValueError, check=mentions(*parts)):
        read_config(model_dir, override_config=override)


def test_unknown_value_is_refused(model_dir):
    with pytest.raises(ValueError, check=suggests("rope_parameters")):
        read_config(model_dir, override_config={"rope_parameter": {}})
