"""A checkpoint that is not, byte for byte, what was written is never loaded; a full disk does not end a run."""

import contextlib
import logging
import re
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
from test_checkpoint import at_step, checkpoints, state_of

from jaxpar.config import Config, RunConfig
from jaxpar.training.checkpoints import checkpoint
from jaxpar.training.checkpoints.run_directory import RunDirectory


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A directory with whole checkpoints of steps 1 and 2."""
    with checkpoints(tmp_path_factory.mktemp("saved"), "fsdp=2", 2, num_layers=1) as at:
        state = state_of(at)
        at.save(at_step(state, 1))
        at.save(at_step(state, 2))
    return at.directory


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


def files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def test_any_flip_and_any_truncation_is_refused(copy, caplog):
    rng = np.random.default_rng(0)
    targets = files(copy / "2")
    assert len(targets) > 8
    for number in range(100):
        path = targets[number % len(targets)]
        whole = path.read_bytes()
        at = int(rng.integers(max(1, len(whole))))
        if number // len(targets) % 2 and whole:
            path.write_bytes(whole[:at])
        elif whole:
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << int(rng.integers(8))]) + whole[at + 1 :])
        else:
            path.write_bytes(b"\0")
        caplog.clear()
        assert checkpoint.latest(copy) == 1, (path, at)
        assert re.search("2 is passed over: .* is (damaged|missing|not of it)", caplog.text)
        path.write_bytes(whole)
    assert checkpoint.latest(copy) == 2


def test_every_byte_of_the_manifest_counts(copy):
    path = copy / "2" / "checksums.sha256"
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        assert checkpoint.latest(copy) == 1, at


def test_a_file_too_few_or_too_many_is_refused(copy):
    for path in files(copy / "2"):
        whole = path.read_bytes()
        path.unlink()
        assert checkpoint.latest(copy) == 1, path
        path.write_bytes(whole)
    for name in ("more", "state/d/more", "state/.hidden", "checksums.sha256.0"):
        (copy / "2" / name).touch()
        assert checkpoint.latest(copy) == 1, name
        (copy / "2" / name).unlink()
    assert checkpoint.latest(copy) == 2


def test_a_damaged_checkpoint_that_is_asked_for_is_one_clear_error(copy):
    at = checkpoints(copy.parent, "data=1", 1, num_layers=1)
    data = max(files(copy / "2"), key=lambda path: path.stat().st_size)
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(ValueError, match=rf"2 is damaged: state/\S*{data.name} is damaged; give another"):
        at.restore(2)
    assert int(at.restore(1).step) == 1
    (copy / "1").rename(copy / "5")
    with pytest.raises(ValueError, match="5 is of step 1; rename it so"):
        at.restore(5)
    shutil.rmtree(copy / "5")
    with pytest.raises(ValueError, match="has no whole checkpoint, of 1: bring one back, or start over"):
        at.latest()


@contextlib.contextmanager
def file_size_limit(size: int):
    """Writes beyond this fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("limit", [0, 700, 20_000])
def test_a_full_disk_is_a_warning_and_the_next_save_is_tried(tmp_path, caplog, limit):
    with checkpoints(tmp_path, "fsdp=2", 2, num_layers=1) as at:
        state = state_of(at)
        at.save(at_step(state, 1))
        at.wait()
        with file_size_limit(limit):
            at.save(at_step(state, 2))
            at.wait()
        assert [record.levelno for record in caplog.records if record.name.startswith("jaxpar")] == [logging.WARNING]
        assert re.search("checkpoint of step 2 not saved: .*; training goes on, step 1 is the last saved", caplog.text)
        whole = [name for name in names(at.directory) if name.isdigit()]  # threads may still write of the other
        assert (whole, at.last_saved, at.latest()) == (["1"], 1, 1)
        at.save(at_step(state, 3))
    assert (names(at.directory), at.last_saved, at.latest()) == (["1", "3"], 3, 3)


def test_a_directory_that_is_gone_is_a_warning_and_the_next_save_is_tried(tmp_path, caplog):
    with checkpoints(tmp_path, "data=1", 1, num_layers=1) as at:
        state = state_of(at)
        at.directory.write_text("no directory")
        at.save(at_step(state, 1))
        at.wait()
        assert re.search("checkpoint of step 1 not saved: .*; training goes on, none is saved", caplog.text)
        assert at.last_saved is None
        at.directory.unlink()
        at.save(at_step(state, 2))
    assert at.latest() == 2


def test_a_save_that_was_killed_leaves_no_checkpoint(copy):
    """Whatever it had written, wherever it stopped."""
    for part in ("3.unfinished", "4.unfinished.orbax-checkpoint-tmp", "1.removed", "2.replaced"):
        shutil.copytree(copy / "2", copy / part)
    with checkpoints(copy.parent, "data=1", 1, num_layers=1) as at:
        assert at.latest() == 2
        state = at.restore(2)
        at.save(at_step(state, 3))
    assert names(copy) == ["1", "2", "3"]
    assert at.latest() == 3


def test_rows_that_a_full_disk_does_not_take_are_written_later(tmp_path, caplog):
    run = RunDirectory.choose(config := Config(run=RunConfig(directory=str(tmp_path / "run"))))
    run.start(config, 0)
    run.append_metrics({"step": 1})
    with file_size_limit(run.metrics.stat().st_size + 3):
        run.append_metrics({"step": 2})
        run.append_metrics({"step": 3})
        assert run.metrics.read_text() == '{"step": 1}\n'
    assert len([record for record in caplog.records if record.name.startswith("jaxpar")]) == 1
    run.append_metrics({"step": 4})
    assert [row["step"] for row in run.read_metrics()] == [1, 2, 3, 4]


def test_two_processes_share_the_work(copy):
    """Each digests every other file; neither share alone passes for the whole."""
    from jaxpar.training.checkpoints import integrity

    directory = copy / "2"
    manifest = directory / "checksums.sha256"
    want = manifest.read_bytes()
    manifest.unlink()
    for index in (1, 0):
        integrity.write_share(directory, index, 2)
    integrity.seal(directory, 2)
    assert manifest.read_bytes() == want

    path = max(files(directory), key=lambda path: path.stat().st_size)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert sorted(integrity.damage(directory, index, 2) is None for index in (0, 1)) == [False, True]
    manifest.unlink()
    integrity.write_share(directory, 0, 2)
    with pytest.raises(OSError, match="No such file"):
        integrity.seal(directory, 2)
