"""Mixtures of experts as they are described: counts against published ones, and descriptions that make no model."""

import pytest

from models.config import ModelConfig
from models.count import num_active_parameters, num_parameters, parameter_counts
from models.presets import preset

LARGE = ModelConfig(
    vocab_size=32000, embed_dim=8192, num_layers=72, num_heads=32, num_kv_heads=8, head_dim=256, expert_mlp_dim=24576,
    num_experts=16,
)  # fmt: skip
LARGEST = LARGE.replace(
    embed_dim=10240, num_layers=128, num_heads=64, num_kv_heads=16, expert_mlp_dim=40960, num_experts=64
)


@pytest.mark.parametrize(
    ("name", "active", "within"),
    [
        ("mixtral-8x7b", 12_879_925_248, 0),  # the total, less 6 of 8 experts
        ("mixtral-8x22b", 39e9, 0.5e9),  # Mistral AI's announcement
        ("qwen3-30b-a3b", 3.3e9, 0.06e9),  # Qwen3's model cards
        ("qwen3-235b-a22b", 22e9, 0.5e9),
        ("olmoe-1b-7b", 1.3e9, 0.05e9),  # arXiv 2409.02060
    ],
)
def test_a_token_meets_the_published_number_of_parameters(name, active, within):
    assert num_active_parameters(preset(name)) == pytest.approx(active, abs=within, rel=0)


@pytest.mark.parametrize(("config", "total", "active"), [(LARGE, 708e9, 99.6e9), (LARGEST, 10.4e12, 376e9)])
def test_models_of_trillions(config, total, active):
    """AI-Hypercomputer/maxtext@e591f30, custom_model.md."""
    assert num_parameters(config) == pytest.approx(total, rel=0.02)
    assert num_active_parameters(config) == pytest.approx(active, rel=0.02)


def test_tiny_moe_by_hand():
    config = preset("tiny-moe")
    assert parameter_counts(config) == parameter_counts(preset("tiny")) | {
        "mlp": 4 * (8 * 3 * 128 * 128 + 8 * 128),
    }
    assert num_parameters(config) - num_active_parameters(config) == 4 * 6 * 3 * 128 * 128
    assert num_active_parameters(preset("tiny")) == num_parameters(preset("tiny"))


@pytest.mark.parametrize(
    ("change", "mlp"),
    [
        ({"num_shared_experts": 2}, 4 * 2 * 3 * 128 * 128),
        ({"balancing": "bias"}, 4 * 8),
        ({"num_dense_layers": 1}, 3 * 128 * 256 - 8 * 3 * 128 * 128 - 8 * 128),
        ({"moe_every": 2}, 2 * (3 * 128 * 256 - 8 * 3 * 128 * 128 - 8 * 128)),
        ({"num_dense_layers": 1, "moe_every": 3}, 3 * (3 * 128 * 256 - 8 * 3 * 128 * 128 - 8 * 128)),
    ],
)
def test_one_option_changes_the_mlps(change, mlp):
    before = parameter_counts(preset("tiny-moe"))
    assert parameter_counts(preset("tiny-moe").replace(**change).check()) == before | {"mlp": before["mlp"] + mlp}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_token": 9}, "num_experts_per_token is 9; it must be from 1 to 8"),
        ({"num_experts_per_token": 0}, "num_experts_per_token is 0; it must be from 1 to 8"),
        ({"num_experts": -1}, "model.num_experts is -1; it must be at least 0"),
        ({"num_dense_layers": 4}, "num_dense_layers is 4; it must be from 0 to 3"),
        ({"moe_every": 3}, "model.num_layers 4 .* not a multiple of model.moe_every 3; the nearest that is: 3"),
        ({"num_expert_groups": 3}, "not a multiple of model.num_expert_groups 3"),
        ({"num_expert_groups": 8, "num_groups_per_token": 1}, "exceeds the 1 experts of model.num_groups_per_token"),
        ({"num_expert_groups": 2, "num_groups_per_token": 3}, "num_groups_per_token is 3; it must be from 1 to 2"),
        ({"router_jitter": 1.5}, "router_jitter is 1.5"),
        ({"mlp_bias": True}, "experts have no biases"),
    ],
)
def test_what_is_no_model_is_said_in_one_line(change, message):
    with pytest.raises(ValueError, match=message) as error:
        preset("tiny-moe").replace(**change).check()
    assert "\n" not in str(error.value)
