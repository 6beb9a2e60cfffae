"""Every token once per epoch, on one data shard, whatever the mesh; and a token file that is always whole."""

import json
import math
import os
import re
import socket
import subprocess
import sys
import sysconfig
import threading
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.data import Loader, TokenFile, build_token_file, find_files
from jaxpar.data.loader import local_rows
from jaxpar.parallel.batch import Batch

AXES = ("data", "pipe", "fsdp", "expert", "context", "tensor")
SPEC = P(None, ("data", "fsdp", "expert"), "context")


def batch_sharding(**sizes: int) -> NamedSharding:
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    devices = jax.devices()[: math.prod(shape)]
    mesh = jax.make_mesh(shape, AXES, axis_types=(AxisType.Explicit,) * len(AXES), devices=devices)
    return NamedSharding(mesh, SPEC)


def counting_tokens(directory: Path, num_tokens: int) -> TokenFile:
    """Token t is t, so that a token says where it came from."""
    path = directory / "counting.bin"
    np.arange(num_tokens, dtype="<u2").tofile(path)
    return TokenFile(path, np.memmap(path, "<u2", mode="r"), num_tokens, vocab_size=2**16, num_documents=1)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
    return path


def same(a: Batch, b: Batch) -> bool:
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in leaves)


# --- sources


def test_the_standard_library_is_a_corpus_on_every_machine():
    files = find_files("stdlib")
    names = {str(file.relative_to(sysconfig.get_path("stdlib"))) for file in files}
    assert {"argparse.py", os.path.join("json", "decoder.py")} <= names
    folders = {folder for name in names for folder in Path(name).parts[:-1]}
    assert "json" in folders
    assert not folders & {"site-packages", "test", "tests", "idlelib"}
    assert files == sorted(files)
    assert 5e6 < sum(file.stat().st_size for file in files) < 30e6
    assert not any(b"\0" in file.read_bytes() for file in files)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("a.txt", ["a.txt"]),
        ("data.bin", ["data.bin"]),
        ("deep", ["deep/b.md", "deep/er/c.py"]),
        (".", ["a.txt", "deep/b.md", "deep/er/c.py"]),
        ("deep/**/*.py", ["deep/er/c.py"]),
        ("**/[ab].*", ["a.txt", "deep/b.md"]),
        ("deep/**", ["deep/b.md", "deep/er/c.py", "deep/er/image.png"]),
        ("./stdlib", ["stdlib"]),
        ("~/a.txt", ["a.txt"]),
    ],
)
def test_files_are_found_by_path_directory_and_glob(tmp_path, monkeypatch, spec, expected):
    for name in ("a.txt", "data.bin", "deep/b.md", "deep/er/c.py", "deep/er/image.png", "stdlib"):
        write(tmp_path / name, name)
    write(tmp_path / "deep/empty.txt", "")
    write(tmp_path / ".git/hidden.txt", "hidden")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert [file.absolute() for file in find_files(spec)] == [tmp_path / name for name in expected]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "corpus/bok.txt",
            r"--data 'corpus/bok\.txt': \S+/bok\.txt does not exist; did you mean 'corpus/book\.txt'\?",
        ),
        ("copus/book.txt", r"--data 'copus/book\.txt': .* did you mean 'corpus'\?"),
        ("zzz", r"--data 'zzz': \S+/zzz does not exist; name a file, a directory, a glob or 'stdlib'"),
        ("", r"--data '': .* does not exist; name a file"),
        ("images", r"--data 'images': no \.md \.py \.rst \.txt file in this directory; name others by"),
        ("corpus/*.rst", r"--data 'corpus/\*\.rst': no file matches \S+/corpus/\*\.rst; correct the glob"),
        ("empty", r"--data 'empty': every file \(2\) is empty; name files with text in them"),
    ],
)
def test_what_names_no_text_is_refused_in_one_line(tmp_path, monkeypatch, spec, message):
    write(tmp_path / "corpus/book.txt", "text")
    write(tmp_path / "images/1.png", "image")
    write(tmp_path / "empty/1.txt", "")
    write(tmp_path / "empty/2.txt", "")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"^{message}") as error:
        find_files(spec)
    assert "\n" not in str(error.value)


# --- the token file


def test_a_document_is_its_bytes_and_a_separator(tmp_path):
    files = [write(tmp_path / "1.txt", "one"), write(tmp_path / "2.txt", "zwölf")]
    token_file = build_token_file(files, tmp_path / "cache")
    assert bytes(token_file.tokens) == b"one\0zw\xc3\xb6lf\0"
    assert (token_file.num_tokens, token_file.vocab_size, token_file.num_documents) == (11, 256, 2)
    assert token_file.path.read_bytes() == bytes(token_file.tokens)
    sidecar = json.loads(token_file.path.with_suffix(".json").read_text())
    expected = {"dtype": "|u1", "num_tokens": 11, "num_documents": 2, "vocab_size": 256}
    assert expected.items() <= sidecar.items()


def test_a_document_longer_than_a_piece_is_whole(tmp_path):
    text = "0123456789abcdef" * (1 << 21) + "end"  # 32 MiB: two pieces and a bit
    tokens = build_token_file([write(tmp_path / "long.txt", text)], tmp_path / "cache").tokens
    assert bytes(tokens) == text.encode() + b"\0"


def test_the_cache_is_used_while_the_files_are_the_same(tmp_path, monkeypatch):
    files = [write(tmp_path / "1.txt", "one"), write(tmp_path / "2.txt", "two")]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    first = build_token_file(files)
    assert first.path.parent == tmp_path / "xdg/jaxpar/tokens"
    written = first.path.stat()
    monkeypatch.chdir(tmp_path)
    again = build_token_file([Path("1.txt"), Path("2.txt")])
    assert again == first
    assert (again.path.stat().st_ino, again.path.stat().st_mtime_ns) == (written.st_ino, written.st_mtime_ns)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda files: os.utime(write(files[0], "longer"), ns=(0, 0)), b"longer\0two\0"),
        (lambda files: os.utime(write(files[0], "ONE"), ns=(0, 1)), b"ONE\0two\0"),
        (lambda files: files.reverse(), b"two\0one\0"),
        (lambda files: files.pop(), b"one\0"),
        (lambda files: files.append(write(files[0].with_name("3.txt"), "three")), b"one\0two\0three\0"),
    ],
    ids=["size", "time", "order", "fewer", "more"],
)
def test_a_changed_corpus_is_tokenized_again(tmp_path, change, expected):
    files = [write(tmp_path / "1.txt", "one"), write(tmp_path / "2.txt", "two")]
    for file in files:
        os.utime(file, ns=(0, 0))
    before = build_token_file(files, tmp_path / "cache")
    change(files)
    after = build_token_file(files, tmp_path / "cache")
    assert bytes(after.tokens) == expected
    assert after.path != before.path
    assert bytes(before.tokens) == b"one\0two\0"


@pytest.mark.parametrize(
    "damage",
    [
        lambda tokens, sidecar: os.truncate(tokens, 5),
        lambda tokens, sidecar: tokens.write_bytes(tokens.read_bytes() + b"more"),
        lambda tokens, sidecar: tokens.unlink(),
        lambda tokens, sidecar: sidecar.unlink(),
        lambda tokens, sidecar: os.truncate(sidecar, 20),
        lambda tokens, sidecar: sidecar.write_text("[]"),
        lambda tokens, sidecar: sidecar.write_text('{"dtype": "|u1"}'),
        lambda tokens, sidecar: (
            tokens.write_bytes(b"not\0our\0"),
            sidecar.write_text(re.sub('"key": "..', '"key": "xx', sidecar.read_text())),
        ),
    ],
    ids=["cut", "longer", "no-tokens", "no-sidecar", "cut-sidecar", "no-object", "no-fields", "other-key"],
)
def test_a_damaged_token_file_is_noticed_and_built_again(tmp_path, damage):
    files = [write(tmp_path / "1.txt", "one"), write(tmp_path / "2.txt", "two")]
    path = build_token_file(files, tmp_path / "cache").path
    damage(path, path.with_suffix(".json"))
    again = build_token_file(files, tmp_path / "cache")
    assert again.path == path
    assert bytes(again.tokens) == path.read_bytes() == b"one\0two\0"


def test_many_builders_at_once_all_get_the_whole_file(tmp_path):
    text = "some text\n" * 100_000
    files = [write(tmp_path / f"{i}.txt", text) for i in range(4)]
    built: list[TokenFile] = []
    start = threading.Barrier(8)

    def build() -> None:
        start.wait()
        built.append(build_token_file(files, tmp_path / "cache"))

    threads = [threading.Thread(target=build) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 8
    assert {token_file.path for token_file in built} == {built[0].path}
    for token_file in built:
        assert bytes(token_file.tokens) == (text.encode() + b"\0") * 4
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} == {".bin", ".json"}
    assert len(list((tmp_path / "cache").iterdir())) == 2


@pytest.mark.parametrize("offset", [2, (1 << 24) + 2])
def test_a_binary_file_is_refused_and_leaves_nothing_behind(tmp_path, offset):
    files = [write(tmp_path / "1.txt", "one"), write(tmp_path / "2.txt", "x" * offset + "\0")]
    message = rf"2\.txt: byte {offset} is NUL, not text; leave the file out of --data$"
    with pytest.raises(ValueError, match=message):
        build_token_file(files, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


# --- batches in host memory


def test_a_batch_is_what_it_says(tmp_path):
    loader = Loader(counting_tokens(tmp_path, 1000), batch_size=12, seq_len=7, num_microbatches=3, seed=5)
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


def test_a_batch_is_a_pure_function_of_seed_and_step(tmp_path):
    tokens = counting_tokens(tmp_path, 1000)
    loader = Loader(tokens, batch_size=8, seq_len=4, num_microbatches=2, seed=3)
    in_order = [loader.host_batch(step) for step in range(40)]
    other = Loader(tokens, batch_size=8, seq_len=4, num_microbatches=2, seed=3)
    assert all(same(other.host_batch(step), in_order[step]) for step in (39, 0, 17, 17))
    different = Loader(tokens, batch_size=8, seq_len=4, num_microbatches=2, seed=4)
    assert not any(same(different.host_batch(step), in_order[step]) for step in range(40))
    assert not same(in_order[0], in_order[1])


@pytest.mark.parametrize("num_tokens", [8 * 12 + 1, 8 * 12 + 8, 8 * 4 + 1])
def test_an_epoch_is_every_sample_once_and_each_has_its_own_order(tmp_path, num_tokens):
    tokens, num_samples = counting_tokens(tmp_path, num_tokens), (num_tokens - 1) // 8
    loader = Loader(tokens, batch_size=4, seq_len=8, num_microbatches=2, seed=0)
    assert loader.num_samples == num_samples
    steps = [loader.host_batch(step) for step in range(3 * num_samples // 4)]
    inputs = np.stack([batch.tokens for batch in steps]).reshape(3, -1)
    targets = np.stack([batch.targets for batch in steps]).reshape(3, -1)
    for epoch in range(3):
        assert np.array_equal(np.sort(inputs[epoch]), np.arange(num_samples * 8))
        assert np.array_equal(np.sort(targets[epoch]), np.arange(num_samples * 8) + 1)
    assert len({epoch.tobytes() for epoch in inputs}) == 3


def test_epochs_are_whole_where_steps_lie_across_them(tmp_path):
    tokens = counting_tokens(tmp_path, 10 * 8 + 1)
    loader = Loader(tokens, batch_size=4, seq_len=8, num_microbatches=1, seed=0)
    steps = [loader.host_batch(step).tokens[0, :, 0] // 8 for step in range(5)]
    samples = np.concatenate(steps).reshape(2, 10)
    assert [sorted(epoch) for epoch in samples.tolist()] == [list(range(10))] * 2


@pytest.mark.parametrize("num_microbatches", [2, 3, 12])
def test_the_rows_and_their_order_do_not_depend_on_the_microbatches(tmp_path, num_microbatches):
    tokens = counting_tokens(tmp_path, 2000)
    whole = Loader(tokens, batch_size=12, seq_len=16, num_microbatches=1, seed=9).host_batch(7)
    cut = Loader(tokens, batch_size=12, seq_len=16, num_microbatches=num_microbatches, seed=9).host_batch(7)
    assert cut.tokens.shape == (num_microbatches, 12 // num_microbatches, 16)
    assert same(jax.tree.map(lambda x: x.reshape(1, 12, 16), cut), whole)


@pytest.mark.parametrize("rows", [slice(1, 3), np.array([0, 3]), np.array([2])])
def test_some_rows_are_those_rows_of_the_whole(tmp_path, rows):
    loader = Loader(counting_tokens(tmp_path, 2000), batch_size=12, seq_len=16, num_microbatches=3, seed=9)
    assert same(loader.host_batch(7, rows), jax.tree.map(lambda x: x[:, rows], loader.host_batch(7)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"batch_size": 16},
            r"the data has 100 tokens, one batch takes 129 \(--batch-size 16 x --seq-len 8 \+ 1\);"
            r" lower either or give more --data",
        ),
        ({"seq_len": 25}, r"the data has 100 tokens, one batch takes 101 "),
        ({"num_microbatches": 3}, r"--batch-size 4 is no multiple of --grad-accumulation 3; change either"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_in_one_line(tmp_path, changes, message):
    sizes = {"batch_size": 4, "seq_len": 8, "num_microbatches": 2, "seed": 0} | changes
    with pytest.raises(ValueError, match=f"^{message}") as error:
        Loader(counting_tokens(tmp_path, 100), **sizes)
    assert "\n" not in str(error.value)


def test_one_batch_may_take_every_token(tmp_path):
    loader = Loader(counting_tokens(tmp_path, 101), batch_size=4, seq_len=25, num_microbatches=1, seed=0)
    assert np.array_equal(np.sort(loader.host_batch(3).targets.ravel()), np.arange(100) + 1)


def test_importing_the_package_does_not_import_grain():
    code = "import jaxpar.data, sys; sys.exit('grain' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


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
def test_no_two_data_shards_see_the_same_sample_in_an_epoch(tmp_path, sizes):
    """Counted from what lies on the devices: each sample once over all steps and batch shards, with replicas
    (pipe, context, tensor) agreeing."""
    seq_len, num_samples, batch_size = 8, 64, 32
    tokens = counting_tokens(tmp_path, num_samples * seq_len + 1)
    loader = Loader(tokens, batch_size=batch_size, seq_len=seq_len, num_microbatches=2, seed=1)
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
def test_a_batch_on_a_mesh_is_the_host_batch_with_the_asked_sharding(tmp_path, sizes):
    loader = Loader(counting_tokens(tmp_path, 3000), batch_size=32, seq_len=8, num_microbatches=2, seed=1)
    sharding = batch_sharding(**sizes)
    batch = loader.batch(3, sharding)
    assert same(jax.tree.map(np.asarray, batch), loader.host_batch(3))
    for field in jax.tree.leaves(batch):
        assert field.sharding == sharding
        assert jax.typeof(field).sharding.spec == SPEC


PROCESS = """
import sys
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from pathlib import Path
from jaxpar.data import Loader, build_token_file
from jaxpar.data.loader import local_rows

process, address, directory = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(address, 2, process, coordinator_bind_address=address)
(a, b), (c, d) = ([x for x in jax.devices() if x.process_index == i] for i in (0, 1))
token_file = build_token_file([directory / "text.txt"], directory / "cache")
loader = Loader(token_file, batch_size=16, seq_len=8, num_microbatches=2, seed=0)
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
