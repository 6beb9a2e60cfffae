"""models/published.py: parameter counts against those of the published checkpoints."""

import pytest

from models.count import num_parameters
from models.presets import preset, preset_names
from models.published import shape, shape_names

# Of the model hub's checkpoints (the totals of their safetensors files), and of LLM Foundry's benchmark table (mpt).
COUNTS = {
    "mpt-125m": 125311488,
    "mpt-1b": 1315950592,
    "mpt-13b": 12853954560,
    "mpt-30b": 29975214080,
    "mpt-70b": 64862437376,
    "opt-125m": 125239296,
    "opt-6.7b": 6658473984,
    "opt-30b": 29974540288,
    "bloom-560m": 559214592,
    "bloom": 176247271424,
    "pythia-70m": 70426624,
    "pythia-6.9b": 6857302016,
    "pythia-12b": 11846072320,
    "gpt-neox-20b": 20554567680,
    "gpt-neo-1.3b": 1315575808,
    "gpt-j-6b": 6050882784,
    "cerebras-gpt-111m": 111050496,
    "llama-33b": 32528943616,
    "llama-65b": 65285660672,
    "codellama-34b": 33743970304,
    "tinyllama-1.1b": 1100048384,
    "llama4-scout": 107769861120,
    "qwen1.5-7b": 7721324544,
    "qwen2-72b": 72706203648,
    "qwen3-30b-a3b": 30532122624,
    "qwen3-235b-a22b": 235093634560,
    "yi-34b": 34388917248,
    "mixtral-8x7b": 46702792704,
    "mixtral-8x22b": 140620634112,
    "mistral-nemo-12b": 12247782400,
    "mistral-large-123b": 122610069504,
    "gemma-7b": 8537680896,
    "gemma2-9b": 9241705984,
    "gemma2-27b": 27227128320,
    "gemma3-1b": 999885952,
    "phi-2": 2779683840,
    "phi-3-mini": 3821079552,
    "phi-4": 14659507200,
    "falcon-7b": 6921720704,
    "falcon-40b": 41303293952,
    "olmo-1b": 1176764416,
    "olmo-7b": 6888095744,
    "olmo2-13b": 13716198400,
    "olmo2-32b": 32234279936,
    "olmoe-1b-7b": 6919161856,
    "smollm3": 3075098624,
    "smollm-360m": 361821120,
    "starcoder": 15517456384,
    "deepseek-v2-lite": 15706484224,
    "deepseek-v2": 235741434880,
    "deepseek-v3": 671026419200,
    "gpt-oss-20b": 20914757184,
    "gpt-oss-120b": 116829156672,
}


@pytest.mark.parametrize(("name", "count"), COUNTS.items(), ids=COUNTS.keys())
def test_counts(name, count):
    assert shape(name).parameters == count


@pytest.mark.parametrize("name", preset_names())
def test_presets_count_as_they_do(name):
    assert shape(name).parameters == num_parameters(preset(name))


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("palm-8b", 8.63),
        ("palm-62b", 62.50),
        ("palm-540b", 540.35),
        ("gopher", 280),
        ("grok-1", 314),
        ("dbrx", 132),
        ("llama4-maverick", 400),
        ("kimi-k2", 1026),
        ("bloomberggpt", 50.6),
        ("nemotron-4-340b", 341),
        ("mt-nlg", 530),
    ],
)
def test_sizes_that_papers_print(name, billions):
    assert shape(name).parameters / 1e9 == pytest.approx(billions, rel=0.01)


# As their makers announce them, to the digits given.
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("mixtral-8x7b", 12.9),
        ("qwen3-30b-a3b", 3.3),
        ("qwen3-235b-a22b", 22),
        ("deepseek-v3", 37),
        ("llama4-scout", 17),
    ],
)
def test_active_parameters(name, billions):
    assert shape(name).active_parameters / 1e9 == pytest.approx(billions, rel=0.02)


# AI-Hypercomputer/maxtext, tests/unit/flop_calculation_test.py: what multiplies a token, to 5 %.
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama2-7b", 6.74),
        ("llama3-8b", 7.50),
        ("mixtral-8x7b", 12.9),
        ("deepseek2-16b", 2.4),
        ("deepseek3-671b", 37),
        ("gpt-oss-20b", 3.6),
    ],
)
def test_matmul_parameters(name, billions):
    assert shape(name).matmul_parameters / 1e9 == pytest.approx(billions, rel=0.05)


def test_parts_add_up():
    for name in shape_names():
        found = shape(name)
        heads = 1 if found.tied else 2
        assert found.parameters == found.non_embedding_parameters + heads * found.embedding
        assert 0 < found.active_parameters <= found.parameters
        assert (found.active_parameters == found.parameters) == (found.num_experts == 0)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama3-8b"),
        ("LLAMA3.1_405B", "llama3.1-405b"),
        ("Qwen3_30B_a3B", "qwen3-30b-a3b"),
        ("EleutherAI/pythia-1B", "pythia-1b"),
        ("PaLM-540B", "palm-540b"),
        ("Mistral-7B-v0.1", "mistral-7b"),
    ],
)
def test_names(name, known):
    assert shape(name).name == known


def test_unknown_name():
    with pytest.raises(ValueError, match="no model is called 'mixtrel-8x7b'; nearest: mixtral-8x7b"):
        shape("mixtrel-8x7b")
