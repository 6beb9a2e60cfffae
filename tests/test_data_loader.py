"""Every token once per epoch, on one data shard, whatever the mesh, the microbatches and the hosts."""

import math
import os
import socket
import subprocess
import sys
from collections import Counter
from fractions import Fraction

import jax
import numpy as np
import pytest
from data_helpers import counting_documents, same, write
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.data import Loader, Prefetcher
from jaxpar.data.loader import local_rows
from jaxpar.data.order import EvaluationOrder, TrainingOrder, interleave
from jaxpar.data.samples import PackedSamples, PlainSamples
from jaxpar.data.split import Documents

AXES = ("data", "pipe", "fsdp", "expert", "context", "tensor")
SPEC = P(None, ("data", "fsdp", "expert"), "context")


def batch_sharding(**sizes: int) -> NamedSharding:
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    devices = jax.devices()[: math.prod(shape)]
    mesh = jax.make_mesh(shape, AXES, axis_types=(AxisType.Explicit,) * len(AXES), devices=devices)
    return NamedSharding(mesh, SPEC)


def plain(num_tokens: int, *, batch_size: int, seq_len: int, num_microbatches: int, seed: int = 0) -> Loader:
    """A loader of one text whose token t is t."""
    samples = PlainSamples(counting_documents([num_tokens]), seq_len)
    order = TrainingOrder((samples.num_samples,), np.zeros(1, np.int64), seed)
    return Loader([samples], order, batch_size=batch_size, num_microbatches=num_microbatches)


def test_a_batch_is_what_it_says():
    loader = plain(1000, batch_size=12, seq_len=7, num_microbatches=3, seed=5)
    batch = loader.host_batch(4)
    for field in (batch.tokens, batch.targets, batch.positions, batch.segment_ids):
        assert (field.shape, field.dtype) == ((3, 4, 7), np.int32)
    assert (batch.loss_weights.shape, batch.loss_weights.dtype) == ((3, 4, 7), np.float32)
    assert (batch.loss_weights == 1).all()
    assert (batch.segment_ids == 0).all()
    assert (batch.positions == np.arange(7)).all()
    assert (batch.tokens[..., 0] % 7 == 0).all()
    assert (batch.tokens == batch.tokens[..., :1] + np.arange(7)).all()
    assert (batch.targets == batch.tokens + 1).all()


def test_a_batch_is_a_pure_function_of_seed_and_step():
    num_tokens = 1000
    loader = plain(num_tokens, batch_size=8, seq_len=4, num_microbatches=2, seed=3)
    in_order = [loader.host_batch(step) for step in range(40)]
    other = plain(num_tokens, batch_size=8, seq_len=4, num_microbatches=2, seed=3)
    assert all(same(other.host_batch(step), in_order[step]) for step in (39, 0, 17, 17))
    different = plain(num_tokens, batch_size=8, seq_len=4, num_microbatches=2, seed=4)
    assert not any(same(different.host_batch(step), in_order[step]) for step in range(40))
    assert not same(in_order[0], in_order[1])


@pytest.mark.parametrize("num_tokens", [8 * 12 + 1, 8 * 12 + 8, 8 * 4 + 1])
def test_an_epoch_is_every_sample_once_and_each_has_its_own_order(num_tokens):
    num_samples = (num_tokens - 1) // 8
    loader = plain(num_tokens, batch_size=4, seq_len=8, num_microbatches=2, seed=0)
    assert loader.samples[0].num_samples == num_samples
    steps = [loader.host_batch(step) for step in range(3 * num_samples // 4)]
    inputs = np.stack([batch.tokens for batch in steps]).reshape(3, -1)
    targets = np.stack([batch.targets for batch in steps]).reshape(3, -1)
    for epoch in range(3):
        assert np.array_equal(np.sort(inputs[epoch]), np.arange(num_samples * 8))
        assert np.array_equal(np.sort(targets[epoch]), np.arange(num_samples * 8) + 1)
    assert len({epoch.tobytes() for epoch in inputs}) == 3


def test_epochs_are_whole_where_steps_lie_across_them():
    num_tokens = 10 * 8 + 1
    loader = plain(num_tokens, batch_size=4, seq_len=8, num_microbatches=1, seed=0)
    steps = [loader.host_batch(step).tokens[0, :, 0] // 8 for step in range(5)]
    samples = np.concatenate(steps).reshape(2, 10)
    assert [sorted(epoch) for epoch in samples.tolist()] == [list(range(10))] * 2


@pytest.mark.parametrize("num_microbatches", [2, 3, 12])
def test_the_rows_and_their_order_do_not_depend_on_the_microbatches(num_microbatches):
    num_tokens = 2000
    whole = plain(num_tokens, batch_size=12, seq_len=16, num_microbatches=1, seed=9).host_batch(7)
    cut = plain(num_tokens, batch_size=12, seq_len=16, num_microbatches=num_microbatches, seed=9).host_batch(7)
    assert cut.tokens.shape == (num_microbatches, 12 // num_microbatches, 16)
    assert same(jax.tree.map(lambda x: x.reshape(1, 12, 16), cut), whole)


@pytest.mark.parametrize("rows", [slice(1, 3), np.array([0, 3]), np.array([2])])
def test_some_rows_are_those_rows_of_the_whole(rows):
    loader = plain(2000, batch_size=12, seq_len=16, num_microbatches=3, seed=9)
    assert same(loader.host_batch(7, rows), jax.tree.map(lambda x: x[:, rows], loader.host_batch(7)))


def test_one_batch_may_take_every_token():
    loader = plain(101, batch_size=4, seq_len=25, num_microbatches=1, seed=0)
    assert np.array_equal(np.sort(loader.host_batch(3).targets.ravel()), np.arange(100) + 1)


def test_importing_the_package_does_not_import_grain():
    code = "import jaxpar.data, sys; sys.exit('grain' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def mixed(num_microbatches: int = 2) -> Loader:
    """Three documents' loaders in a mixture: one plain text of two runs, one that repeats, one packed."""
    whole = counting_documents([40] * 10)
    some = Documents(whole.file, whole.starts[[0, 1, 5, 6, 7]], whole.lengths[[0, 1, 5, 6, 7]], None)
    samples = [PlainSamples(some, 8), PlainSamples(counting_documents([17]), 8), PackedSamples(whole, 8)]
    order = TrainingOrder(tuple(s.num_samples for s in samples), interleave([Fraction(2), *[Fraction(1)] * 2]), 0)
    return Loader(samples, order, batch_size=16, num_microbatches=num_microbatches)


def test_a_mixture_on_many_hosts_is_the_mixture_on_one():
    """Hosts are sets of rows: together they read every row of every step once."""
    one = mixed(num_microbatches=1)
    hosts = [np.array([0, 5]), np.array([1, 2, 3]), np.array([4, 6, 7])]
    for step in range(12):
        parts = [mixed().host_batch(step, rows) for rows in hosts]
        joined = jax.tree.map(lambda *x: np.concatenate(x, axis=1)[:, np.argsort(np.concatenate(hosts))], *parts)
        assert same(jax.tree.map(lambda x: x.reshape(1, 16, 8), joined), one.host_batch(step))


def test_text_that_is_held_out_is_passed_over():
    whole = counting_documents([10] * 8)
    kept = Documents(whole.file, whole.starts[[0, 1, 3, 6, 7]], whole.lengths[[0, 1, 3, 6, 7]], None)
    text = [*range(20), *range(30, 40), *range(60, 80)]
    samples = PlainSamples(kept, 7)
    batch = samples.rows(np.arange(samples.num_samples))
    assert samples.num_samples == 7
    assert batch.tokens.ravel().tolist() == text[:49]
    assert batch.targets.ravel().tolist() == text[1:50]


def test_an_evaluation_has_every_token_once_and_then_padding():
    samples = [PlainSamples(counting_documents([30]), 8, with_rest=True), PackedSamples(counting_documents([9, 4]), 8)]
    order = EvaluationOrder(tuple(s.num_samples for s in samples))
    assert order.num_samples == (4, 2)
    loader = Loader(samples, order, batch_size=4, num_microbatches=2)
    first, second = loader.host_batch(0), loader.host_batch(1)
    assert same(loader.host_batch(1), second)
    counted = [batch.targets[batch.loss_weights > 0].tolist() for batch in (first, second)]
    assert sorted(counted[0] + counted[1]) == sorted([*range(1, 30), *range(13)])
    assert (second.loss_weights.reshape(4, 8)[2:] == 0).all()
    assert loader.host_batch(2).loss_weights.sum() == 0


# --- batches on meshes

MESHES = [
    {},
    {"data": 4, "tensor": 2},
    {"data": 2, "tensor": 4},
    {"fsdp": 8},
    {"data": 2, "fsdp": 2, "expert": 2},
    {"data": 2, "context": 4},
    {"fsdp": 4, "context": 2},
    {"pipe": 2, "fsdp": 2, "context": 2, "tensor": 2},
    {"data": 2, "fsdp": 4, "expert": 2},
]


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_no_two_data_shards_see_the_same_sample_in_an_epoch(sizes):
    """Counted from what lies on the devices: each sample once over all steps and batch shards, with replicas
    (pipe, context, tensor) agreeing."""
    seq_len, num_samples, batch_size = 8, 64, 32
    loader = plain(num_samples * seq_len + 1, batch_size=batch_size, seq_len=seq_len, num_microbatches=2, seed=1)
    sharding = batch_sharding(**sizes)
    coordinates = {device: at for at, device in np.ndenumerate(sharding.mesh.devices)}
    on_batch_axes = [AXES.index(axis) for axis in ("data", "fsdp", "expert")]

    seen: Counter[int] = Counter()
    for step in range(num_samples // batch_size):
        samples_of_shard: dict[tuple[int, ...], list[int]] = {}
        for shard in loader.batch(step, sharding).tokens.addressable_shards:
            shard_id = tuple(coordinates[shard.device][axis] for axis in on_batch_axes)
            samples = (np.asarray(shard.data)[..., 0] // seq_len).ravel().tolist()
            assert samples_of_shard.setdefault(shard_id, samples) == samples
        assert len(samples_of_shard) == math.prod(sizes.get(axis, 1) for axis in ("data", "fsdp", "expert"))
        seen.update(sample for samples in samples_of_shard.values() for sample in samples)
    assert seen == Counter(range(num_samples))


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_a_batch_on_a_mesh_is_the_host_batch_with_the_asked_sharding(sizes):
    loader = plain(3000, batch_size=32, seq_len=8, num_microbatches=2, seed=1)
    sharding = batch_sharding(**sizes)
    batch = loader.batch(3, sharding)
    assert same(jax.tree.map(np.asarray, batch), loader.host_batch(3))
    for field in jax.tree.leaves(batch):
        assert field.sharding == sharding
        assert jax.typeof(field).sharding.spec == SPEC


def test_batches_are_put_on_devices_ahead_of_their_step():
    loader, sharding = plain(3000, batch_size=32, seq_len=8, num_microbatches=2), batch_sharding(data=2, context=4)
    with (
        jax.set_mesh(sharding.mesh),
        Prefetcher(lambda step: loader.batch(step, sharding), first=2, stop=5, depth=2) as ahead,
    ):
        for step in range(2, 5):
            batch = ahead.next()
            assert batch.targets.sharding == sharding
            assert same(jax.tree.map(np.asarray, batch), loader.host_batch(step))


PROCESS = """
import sys
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from pathlib import Path
from jaxpar.config import DataConfig
from jaxpar.data import prepare
from jaxpar.data.loader import local_rows

process, address, directory = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(address, 2, process, coordinator_bind_address=address)
(a, b), (c, d) = ([x for x in jax.devices() if x.process_index == i] for i in (0, 1))
config = DataConfig(str(directory / "text.txt"), batch_size=16, seq_len=8)
loader = prepare(config, vocab_size=256, seed=0, num_microbatches=2, cache_dir=directory / "cache").train
shape = (2, 8, 8)
everything = list(range(8))
for devices, rows in [
    ([[a], [b], [c], [d]], [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ([[a], [c], [b], [d]], [[0, 1, 4, 5], [2, 3, 6, 7]]),
    ([[d], [a], [b], [c]], [[2, 3, 4, 5], [0, 1, 6, 7]]),
    ([[a, b], [c, d]], [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ([[a, c], [b, d]], [everything, everything]),
    ([[a, c], [d, b]], [everything, everything]),
    ([[a, c, b, d]], [everything, everything]),
]:
    mesh = Mesh(np.array(devices), ("data", "context"), axis_types=(AxisType.Explicit,) * 2)
    sharding = NamedSharding(mesh, P(None, "data", "context"))
    assert local_rows(sharding, shape).tolist() == rows[process]
    for step in range(3):
        whole, batch = loader.host_batch(step), loader.batch(step, sharding)
        for name in ("tokens", "targets", "positions", "segment_ids", "loss_weights"):
            array, expected = getattr(batch, name), getattr(whole, name)
            assert array.shape == shape and array.sharding == sharding and len(array.addressable_shards) == 2
            for shard in array.addressable_shards:
                assert np.array_equal(np.asarray(shard.data), expected[shard.index]), (devices, name)
print("checked", process)
"""


def test_each_of_two_processes_reads_its_own_rows(tmp_path):
    """Rows with gaps, a sequence that lies across processes, and devices in no grid order."""
    write(tmp_path / "text.txt", "".join(map(chr, np.random.default_rng(0).integers(32, 127, 1000))))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"JAX_PLATFORMS": "cpu", "NPROC": "16"}
    command = [sys.executable, "-c", PROCESS]
    processes = [
        subprocess.Popen(
            [*command, str(process), address, str(tmp_path)],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for process in range(2)
    ]
    results = [process.communicate(timeout=60) for process in processes]
    for index, (out, error) in enumerate(results):
        assert out == f"checked {index}\n", error


def test_one_process_needs_every_row():
    assert local_rows(batch_sharding(data=2, tensor=2), (2, 8, 8)).tolist() == list(range(8))
