"""What a pipeline's step takes of memory on devices that are not here, as their compiler says."""

import functools

import jax
import pytest
from jax.experimental import topologies

from jaxpar import verify
from jaxpar.config import Config, DataConfig, ParallelConfig
from meshes import parse_mesh
from models.config import ModelConfig

MESH = "pipe=4,fsdp=4,tensor=2"
MODEL = ModelConfig(
    name="wide",
    vocab_size=32_000,
    embed_dim=4096,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    mlp_dim=14_336,
    max_seq_len=4096,
)


@functools.cache
def temporaries(
    kind: str, num_microbatches: int, remat: str = "full", devices: tuple[jax.Device, ...] | None = None
) -> int:
    """Bytes, of a step on 32 devices: H100s, by default. A microbatch has one sequence per data rank."""
    config = Config(
        model=MODEL,
        data=DataConfig(batch_size=4 * num_microbatches, seq_len=MODEL.max_seq_len),
        parallel=ParallelConfig(mesh=MESH, pipeline=kind, grad_accumulation=num_microbatches, remat=remat),
    )
    compiled = verify.compiled_step(config, parse_mesh(MESH, 32), devices)
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("kind", ["1f1b", pytest.param("zb-h1", marks=pytest.mark.slow)])
def test_more_microbatches_take_no_more(kind):
    assert temporaries(kind, 64) == pytest.approx(temporaries(kind, 8), rel=0.02)


def test_1f1b_takes_half_of_gpipe():
    """Which has what is kept for each microbatch's backward pass at once."""
    assert temporaries("1f1b", 16, remat="dots") <= 0.5 * temporaries("gpipe", 16, remat="dots")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["1f1b", "zb-h1"])
def test_more_microbatches_take_no_more_of_a_tpu_slice(kind, monkeypatch):
    for name, value in {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}.items():
        monkeypatch.setenv(name, value)
    slice_ = tuple(topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x4x4").devices)
    assert temporaries(kind, 64, devices=slice_) == pytest.approx(temporaries(kind, 8, devices=slice_), rel=0.02)
