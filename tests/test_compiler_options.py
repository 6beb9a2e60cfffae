"""Every option of the tables is taken by its platform's compiler and changes what it makes of a sharded train step."""

import re
from collections import Counter

import jax
import pytest
from jax.experimental import topologies

from jaxpar.audit.topology import gpu_devices
from jaxpar.config import Config, DataConfig, ParallelConfig
from jaxpar.training import optimizers, setup
from jaxpar.training.compiler_options import TABLES, Options, as_text, resolve
from jaxpar.training.step import abstract_batch, abstract_state, make_step
from meshes import build_mesh
from models.config import ModelConfig

MODEL = ModelConfig(vocab_size=512, embed_dim=256, num_layers=4, num_heads=8, num_kv_heads=8, head_dim=32, mlp_dim=1024)


WIDE = MODEL.replace(vocab_size=256, num_layers=2, embed_dim=2048, mlp_dim=4096)


def lowered_step(devices, model_config: ModelConfig = MODEL) -> jax.stages.Lowered:
    config = Config(
        model=model_config,
        data=DataConfig(batch_size=2 * len(devices), seq_len=128),
        parallel=ParallelConfig(mesh=f"fsdp={len(devices)}"),
    )
    mesh = build_mesh(config.parallel.mesh, "", devices)
    model = setup.make_model(config, mesh)
    tx = optimizers.make(config.optimizer, config.run.steps, model.names)
    arguments = abstract_state(model, tx), abstract_batch(config, model)
    with jax.set_mesh(mesh), jax.enable_x64(False):  # as in a run: loops then count in int32, which TPU pipelines
        return jax.jit(make_step(model, tx, 1.0), donate_argnums=0).lower(*arguments)


def hidden(hlo: str) -> Counter[tuple[str, bool]]:
    """FSDP's transfers in the layers' loops: (operation, whether a matmul runs between its start and its end)."""
    found: Counter[tuple[str, bool]] = Counter()
    open_: dict[str, bool] = {}
    in_loop = False
    for line in hlo.splitlines():
        if not line.startswith(" "):
            open_, in_loop = {}, "region" in line
        elif start := re.match(r" +(?:ROOT )?%(\S+) = .* (?:all-gather|reduce-scatter)-start\(", line):
            open_[start[1]] = False
        elif done := re.search(r" (all-gather|reduce-scatter)-done\(%([^)]*)\)", line):
            found[done[1], open_.pop(done[2])] += in_loop
        elif re.search(r" fusion(?:-start)?\(", line) and "gemm_fusion" in line:
            open_ = dict.fromkeys(open_, True)
    return found


def share(transfers: Counter[tuple[str, bool]]) -> float:
    return sum(count for (_, is_hidden), count in transfers.items() if is_hidden) / transfers.total()


@pytest.fixture(scope="module")
def h100_step() -> jax.stages.Lowered:
    return lowered_step(gpu_devices("h100:1x8"))


def program(step: jax.stages.Lowered, options) -> str:
    text = step.compile(compiler_options=options).as_text()
    assert text is not None
    return text


def test_the_gpu_table_hides_more_transfers_of_the_layers_loops_behind_matmuls(h100_step):
    options = resolve("auto", "gpu")
    plain, with_table = program(h100_step, {}), program(h100_step, options)
    before, after = hidden(plain), hidden(with_table)
    assert before["all-gather", False] >= 2
    assert after["all-gather", True] >= 2
    assert share(after) > share(before)
    check_each_changes(h100_step, options, with_table)


def test_gradients_are_reduce_scattered_over_a_whole_tpu_pod():
    """Along one dimension of its torus after the other (fsdp.Folds); with the table's options, each of which counts."""
    environment = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    environment |= {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v5litepod-8"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:16x16").devices
        options = resolve("auto", "tpu")
        step = lowered_step(devices, WIDE)
        text = program(step, options)
        check_each_changes(step, options, text)
    assert text.count(" reduce-scatter(") >= 2, "gradients are all-reduced"


def check_each_changes(step: jax.stages.Lowered, options: Options, with_all: str) -> None:
    for name in options:
        others = {other: value for other, value in options.items() if other != name}
        assert program(step, others) != with_all, f"{name} changes nothing"


def test_resolve_and_back():
    assert resolve("none", "gpu") == {}
    assert resolve("auto", "cpu") == {}
    assert resolve("", "gpu") == resolve("auto", "gpu") == {option.name: option.value for option in TABLES["gpu"]}
    text = "none,xla_gpu_enable_pipelined_p2p=true,xla_gpu_all_gather_combine_threshold_bytes=1024"
    options = {"xla_gpu_enable_pipelined_p2p": True, "xla_gpu_all_gather_combine_threshold_bytes": "1024"}
    assert resolve(text, "gpu") == options
    assert as_text(options) == text
    on_top = resolve("xla_gpu_enable_while_loop_double_buffering=false", "gpu")
    assert on_top == resolve("auto", "gpu") | {"xla_gpu_enable_while_loop_double_buffering": False}
    assert resolve(as_text(on_top), "gpu") == on_top
    assert as_text({}) == "none"


@pytest.mark.parametrize(
    ("text", "platform", "message"),
    [
        ("fast", "gpu", "begins with 'fast'; write auto, none or NAME=VALUE"),
        ("auto,xla_gpu_enable_pipelined_all_gather", "gpu", "write NAME=VALUE"),
        ("xla_tpu_enable_async_all_to_all=true", "gpu", "'xla_tpu_enable_async_all_to_all' is no option for gpu"),
        ("xla_gpu_enable_pipelined_all_gather=true", "cpu", "is no option for cpu"),
        ("none,xla_cpu_nonsense=1", "cpu", "the cpu compiler says: No such compile option: 'xla_cpu_nonsense'"),
        ("none,xla_cpu_enable_fast_math=maybe", "cpu", "'maybe' is not a valid bool value"),
    ],
)
def test_what_is_no_option_is_said_in_one_line(text, platform, message):
    with pytest.raises(ValueError, match="--compiler-options") as caught:
        resolve(text, platform)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
