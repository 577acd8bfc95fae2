import errno
import os
import shutil

import h5py
import numpy as np
import pytest

from hpcgen.checkpoint import CheckpointFailed, CheckpointReader, CheckpointWriter, Snapshot, commit, next_epoch
from hpcgen.checkpoint import writer as writer_module
from hpcgen.checkpoint.manifest import node_path
from tests.checkpoint.sequences import LAYOUT, PAGE_BYTES, Store, assert_equal, assert_kv, rich_sequence, sequence


class Clock:
    """A clock that a write of a page, or a sync, moves on."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def store():
    return Store()


def save(directory, epoch, sequences, store=None, deadline=None, **options):
    writer = CheckpointWriter(directory, layout=LAYOUT, **options)
    return commit(directory, epoch, [writer.write(epoch, sequences, store.read if store else None, deadline)])


def latest(directory, layout=LAYOUT):
    warnings = []
    return CheckpointReader(directory, warnings.append).latest(layout), warnings


def test_sequences_and_their_kv_come_back(tmp_path, store):
    written = [sequence(1, 100, store=store), rich_sequence(2), sequence(3, 300, store=store)]
    save(tmp_path, 1, written, store)
    checkpoint, warnings = latest(tmp_path)
    assert warnings == []
    assert_equal(checkpoint.sequences, written)
    assert_kv(checkpoint, written[0], store, 99)
    assert_kv(checkpoint, written[1], store, 0)
    assert_kv(checkpoint, written[2], store, 299)


def test_without_pages_only_tokens_are_saved(tmp_path, store):
    written = [sequence(1, store=store)]
    manifest = save(tmp_path, 1, written)
    assert manifest.pages == 0
    checkpoint, _ = latest(tmp_path)
    assert_equal(checkpoint.sequences, written)
    assert checkpoint.kv == {}


def test_the_deadline_leaves_out_what_is_cheapest_to_recompute(tmp_path, store):
    clock = Clock()

    def slow(page):
        clock.now += 1
        return store.read(page)

    written = [sequence(1, 65, store=store), sequence(2, 449, store=store)]
    writer = CheckpointWriter(tmp_path, layout=LAYOUT, clock=clock)
    file = writer.write(1, written, slow, deadline=4.5)
    commit(tmp_path, 1, [file])
    assert (file.pages, file.pages_left_out) == (5, 3)
    checkpoint, _ = latest(tmp_path)
    assert_equal(checkpoint.sequences, written)
    assert_kv(checkpoint, written[1], store, 5 * 64)
    assert_kv(checkpoint, written[0], store, 0)


def test_a_deadline_that_has_passed_still_saves_every_token(tmp_path, store):
    written = [sequence(1, store=store)]
    assert save(tmp_path, 1, written, store, deadline=-1.0, clock=Clock()).pages == 0
    assert_equal(latest(tmp_path)[0].sequences, written)


def test_the_time_of_the_last_sync_is_kept_free_before_the_deadline(tmp_path, store, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(writer_module, "SYNC_BYTES", 2 * PAGE_BYTES)
    sync = os.fsync

    def slow_sync(fd):
        clock.now += 10
        sync(fd)

    monkeypatch.setattr(os, "fsync", slow_sync)
    written = [sequence(1, 64 * 20, store=store)]
    file = CheckpointWriter(tmp_path, layout=LAYOUT, clock=clock).write(1, written, store.read, deadline=45.0)
    assert file.pages == 4  # synced at 10 (state), 20 and 30; another page would leave less than a sync may take
    assert clock.now <= 45


def test_pages_that_changed_hands_while_they_were_written_are_not_used(tmp_path, store):
    written = [sequence(1, 300, store=store), sequence(2, 200, store=store)]
    file = CheckpointWriter(tmp_path, layout=LAYOUT).write(1, written, store.read)
    commit(tmp_path, 1, [file], void=[(1, 0)])
    checkpoint, _ = latest(tmp_path)
    assert_equal(checkpoint.sequences, written)
    assert_kv(checkpoint, written[0], store, 0)
    assert_kv(checkpoint, written[1], store, 199)


def test_a_write_that_is_given_up_has_the_pages_it_came_to(tmp_path, store):
    written = [sequence(1, 300, store=store), sequence(2, 200, store=store)]
    last = written[0].pages[2]
    file = CheckpointWriter(tmp_path, layout=LAYOUT).write(1, written, lambda p: None if p == last else store.read(p))
    commit(tmp_path, 1, [file])
    checkpoint, _ = latest(tmp_path)
    assert_kv(checkpoint, written[0], store, 128)
    assert_kv(checkpoint, written[1], store, 0)


def test_a_snapshot_does_not_follow_its_sequences(tmp_path, store):
    written = sequence(1, 100, store=store)
    snapshot = Snapshot.of([written], stored=lambda s: 64)
    written.output.extend([1, 2, 3])
    writer = CheckpointWriter(tmp_path, layout=LAYOUT)
    commit(tmp_path, 1, [writer.write_snapshot(1, snapshot, store.read)])
    checkpoint, _ = latest(tmp_path)
    assert checkpoint.sequences[0].length == 100
    assert_kv(checkpoint, written, store, 64)


def test_the_file_describes_itself(tmp_path, store):
    save(tmp_path, 1, [sequence(1, 100, store=store)], store)
    with h5py.File(node_path(tmp_path, 1, 0)) as h5:
        assert dict(h5.attrs)["format"] == "hpcgen checkpoint"
        assert h5.attrs["page_layout.layers"] == 2
        assert h5["pages/data"].shape == (2, PAGE_BYTES)
        assert h5["pages/data"].chunks == (1, PAGE_BYTES)
        assert h5["sequences/prompt/values"].dtype == np.uint32
        assert h5py.check_enum_dtype(h5["sequences/status"].dtype)["ACTIVE"] == h5["sequences/status"][0]
        assert all(h5["pages"][name].attrs["description"] for name in ("sequence", "index", "crc32", "data"))


@pytest.mark.parametrize("bytes_left", [0, 1, 5_000, 20_000, 40_000])
def test_a_full_disk_fails_the_epoch_with_a_message_and_the_next_attempt_succeeds(
    tmp_path, store, monkeypatch, bytes_left
):
    written = [sequence(i, 600, store=store) for i in range(1, 6)]
    save(tmp_path, 1, written, store)
    before = sorted(tmp_path.iterdir())
    pwrite, room = os.pwrite, bytes_left

    def full(fd, data, offset):
        nonlocal room
        if room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = pwrite(fd, memoryview(data)[:room], offset)
        room -= count
        return count

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(CheckpointFailed, match="No space left on device"):
            CheckpointWriter(tmp_path, layout=LAYOUT).write(2, written, store.read)
    assert sorted(tmp_path.iterdir()) == before
    assert latest(tmp_path)[0].epoch == 1
    save(tmp_path, 2, written, store)
    assert latest(tmp_path)[0].epoch == 2


def test_an_unwritable_directory_fails_the_epoch_with_a_message(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointFailed, match=r"file"):
        CheckpointWriter(tmp_path / "file").write(1, [sequence(1)])


@pytest.mark.parametrize("call", ["pwrite", "fsync", "rename", "replace", "unlink"])
def test_a_kill_at_any_call_leaves_a_whole_epoch(tmp_path, store, call):
    """Runs the same second epoch again and again in a child that dies at the n-th call, until it survives."""
    first = [sequence(i, 200, store=store) for i in (1, 2)]
    second = [sequence(1, 230, 50), sequence(2, 230, 50), sequence(3, 90)]
    for s, old in zip(second, first, strict=False):
        s.pages, s.kv_length = [*old.pages, *store.take(1)], 229
    save(tmp_path / "0", 1, first, store)
    epochs_seen = set()
    for n in range(1, 500):
        directory = tmp_path / str(n)
        shutil.copytree(tmp_path / "0", directory)
        killed = run_and_kill(call, n, lambda directory=directory: save(directory, 2, second, store))
        checkpoint, _ = latest(directory)
        assert_equal(checkpoint.sequences, {1: first, 2: second}[checkpoint.epoch])
        assert_kv(checkpoint, first[0], store, checkpoint.sequences[0].kv_length)
        epochs_seen.add(checkpoint.epoch)
        if not killed:
            break
        again = next_epoch(directory)
        save(directory, again, second, store)
        assert latest(directory)[0].epoch == again
    assert not killed
    assert 2 in epochs_seen


def run_and_kill(call, n, action):
    """Runs `action` in a child that dies at the n-th `os.call`; whether it died."""
    child = os.fork()
    if child == 0:
        original, calls = getattr(os, call), 0

        def deadly(*args, **options):
            nonlocal calls
            calls += 1
            if calls == n:
                os._exit(7)
            return original(*args, **options)

        setattr(os, call, deadly)
        action()
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 7)
    return status == 7
