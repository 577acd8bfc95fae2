"""One node saves beside the computation, gives up, and loads what is whole and worth it."""

import os
import threading

import pytest
import torch

from hpcgen.checkpoint import CheckpointFailed, CheckpointReader, Snapshot, commit, node_tasks
from hpcgen.checkpoint.manifest import NodeFile, node_path
from hpcgen.checkpoint.node_tasks import Load, NodeCheckpoint, Save, SaveBeside, Saved, Wanted, page_layout
from hpcgen.kernels.attention.kv_layout import KVLayout
from hpcgen.memory.host_store import HostStore
from tests.checkpoint.sequences import sequence

LAYOUT = KVLayout(1, 1, 4, 1, 4, torch.float32)


class Node:
    """A node with a host store of pages with distinct contents."""

    def __init__(self, directory, pages=32, seed=0):
        self.directory = directory
        self.store = HostStore(LAYOUT, pages)
        self.store.pages.random_(0, 256, generator=torch.Generator().manual_seed(seed))
        self.tasks = NodeCheckpoint(directory, 0, self.store)

    def sequence(self, request, length):
        s = sequence(request, length)
        s.kv_length = length - 1
        s.pages = self.store.allocate(-(-s.kv_length // 64))
        return s

    def commit(self, epoch, sequences):
        commit(self.directory, epoch, [self.tasks.perform(Save(epoch, Snapshot.of(sequences), None))])

    def wanted(self):
        checkpoint = CheckpointReader(self.directory).latest(page_layout(LAYOUT))
        return [Wanted(s.id, kv, kv.tokens) for s in checkpoint.sequences if (kv := checkpoint.kv.get((s.request, 0)))]


@pytest.fixture
def node(tmp_path):
    made = Node(tmp_path)
    yield made
    made.tasks.close()


def test_pages_come_back_into_another_host_store(node):
    written = [node.sequence(1, 100), node.sequence(2, 300)]
    node.commit(1, written)
    other = Node(node.directory, seed=1)
    loaded = other.tasks.perform(Load(node.wanted(), None))
    assert loaded.warnings == []
    for s in written:
        pages, tokens = loaded.kv[s.id]
        assert tokens == s.kv_length
        assert torch.equal(other.store.pages[pages], node.store.pages[s.pages])


def test_the_pages_before_a_damaged_one_are_loaded_and_the_others_given_back(node):
    node.commit(1, [node.sequence(1, 300)])
    path = node_path(node.directory, 1, 0)
    damaged = bytearray(path.read_bytes())
    third = node.store.pages[2].numpy().tobytes()
    damaged[damaged.index(third) + 5] ^= 1
    path.write_bytes(damaged)
    other = Node(node.directory, seed=1)
    loaded = other.tasks.perform(Load(node.wanted(), None))
    pages, tokens = loaded.kv[1]
    assert (len(pages), tokens) == (2, 128)
    assert other.store.free == 30
    assert len(loaded.warnings) == 1
    assert "wrong checksum; the KV from there on is recomputed" in loaded.warnings[0]


def test_kv_that_is_sooner_computed_than_read_is_left(node, monkeypatch):
    monkeypatch.setattr(node_tasks, "MEASURED_BYTES", 1)
    node.commit(1, [node.sequence(1, 100), node.sequence(2, 300)])
    other = Node(node.directory, seed=1)
    assert len(other.tasks.perform(Load(node.wanted(), 1e12)).kv) == 1  # the first one measures the rate
    assert len(other.tasks.perform(Load(node.wanted(), 1e-3)).kv) == 2


def test_a_save_beside_the_computation_is_done_when_it_says_so_and_holds_the_tokens_of_its_beginning(node):
    s = node.sequence(1, 200)
    node.tasks.perform(SaveBeside(1, Snapshot.of([s]), 30.0))
    s.output.append(7)
    node.tasks._saving._thread.join()
    file = node.tasks.perform(Saved())
    assert isinstance(file, NodeFile)
    assert (file.sequences, file.pages) == (1, 4)
    commit(node.directory, 1, [file])
    assert CheckpointReader(node.directory).latest().sequences[0].length == 200


def test_a_save_before_leaving_does_not_wait_for_the_one_beside(node, monkeypatch):
    s, sync, hold = node.sequence(1, 200), os.fsync, threading.Event()

    def slow(fd):
        if threading.current_thread().name == "checkpoint":
            hold.wait(30)
        sync(fd)

    monkeypatch.setattr(os, "fsync", slow)
    node.tasks.perform(SaveBeside(1, Snapshot.of([s]), 30.0))
    assert node.tasks.perform(Saved()) is None
    node.commit(2, [s])
    hold.set()
    node.tasks.close()
    assert CheckpointReader(node.directory).latest().epoch == 2


def test_a_failed_save_is_an_answer(tmp_path):
    (tmp_path / "file").write_text("")
    node = Node(tmp_path / "file")
    assert isinstance(node.tasks.perform(Save(1, Snapshot.of([]), None)), CheckpointFailed)
    node.tasks.perform(SaveBeside(1, Snapshot.of([]), 1.0))
    node.tasks._saving._thread.join()
    assert isinstance(node.tasks.perform(Saved()), CheckpointFailed)
