"""When checkpoints are written, what is in them, and who loads it: nodes of this process, an engine that stands."""

import errno
import os
from array import array

import pytest
import torch

from hpcgen.checkpoint.manifest import epochs
from hpcgen.checkpoint.node_tasks import NodeCheckpoint, page_layout
from hpcgen.checkpoint.periodic import FIRST_RETRY
from hpcgen.jobs.recovery import Recovery, prefill_rate
from hpcgen.kernels.attention.kv_layout import KVLayout
from hpcgen.memory.host_store import HostStore
from hpcgen.report.events import EventLog, read_events
from hpcgen.sequence import SamplingParams, Sequence, Status

LAYOUT = KVLayout(1, 1, 4, 1, 4, torch.float32)


class Nodes:
    """Nodes with a host store each; sequence s has its KV on node s % count."""

    ranks = 1.0
    in_place = True

    def __init__(self, directory, count, pages=32, seed=0):
        self.count, self.pages, self.layout = count, pages, page_layout(LAYOUT)
        self.stores = [HostStore(LAYOUT, pages) for _ in range(count)]
        for store in self.stores:
            store.pages.random_(0, 256, generator=torch.Generator().manual_seed(seed))
        self.tasks = [NodeCheckpoint(directory, node, store) for node, store in enumerate(self.stores)]

    def ask(self, tasks):
        return {node: self.tasks[node].perform(task) for node, task in tasks.items()}

    def node_of(self, sequence):
        return sequence % self.count

    def close(self):
        for node in self.tasks:
            node.close()

    def bytes_of(self, node, sequence):
        return self.stores[node].pages[sequence.pages].numpy().tobytes()


class Engine:
    """Has sequences, and computes nothing."""

    def __init__(self):
        self.held, self.node = {}, {}

    def sequences(self):
        return list(self.held.values())

    def add(self, sequence, node=None):
        self.held[sequence.id], self.node[sequence.id] = sequence, node

    def suspend_all(self):
        pass


class Results:
    """Every request is wanted."""

    def __init__(self):
        self.ended = []

    def is_wanted(self, request):
        return True

    def unassembled(self):
        return iter(self.ended)

    def finish(self, sequence):
        self.ended.append(sequence)


class Job:
    """One job of a run: so many nodes, and a clock that stands unless it is moved."""

    def __init__(self, directory, count, pages=32, seed=0):
        self.directory, self.said, self.now = directory / "checkpoints", [], 0.0
        self.nodes, self.engine, self.results = Nodes(self.directory, count, pages, seed), Engine(), Results()
        self.events = EventLog(directory / "events.jsonl")
        self.recovery = Recovery(
            self.directory, self.nodes, interval=600.0, events=self.events, say=self.said.append, clock=lambda: self.now
        )

    def decode(self, key, length):
        """Adds a sequence that has come to `length` tokens."""
        s = Sequence(key, key, 0, array("I", range(10)), SamplingParams(max_tokens=500))
        s.output = array("I", range(100, 90 + length))
        s.status, s.kv_length = Status.SUSPENDED, length - 1
        s.pages = self.nodes.stores[self.nodes.node_of(key)].allocate(-(-s.kv_length // 64))
        self.engine.add(s)
        return s

    def written(self):
        """Lets the nodes end their writing and the manifest be written."""
        for node in self.nodes.tasks:
            node._saving._thread.join()
        self.now += 1
        self.recovery.save_if_due(self.engine, self.results)
        self.recovery._commit._thread.join()
        self.recovery.save_if_due(self.engine, self.results)

    def save_periodically(self):
        self.now += 600
        self.recovery.save_if_due(self.engine, self.results)
        self.written()

    def leave(self, deadline=None):
        saved = self.recovery.save_before_leaving(self.engine, self.results, deadline)
        self.recovery.close()
        self.events.close()
        return saved

    def restore(self, rate=None):
        self.recovery.restore(self.engine, self.results, rate)
        return self.engine.held


def assert_goes_on(job, before, after, kv_tokens):
    """`after` of `job` has the tokens of `before` and its KV on the node where it was put."""
    now = job.engine.held[after.id]
    assert (now.output, now.kv_length) == (before.output, kv_tokens)
    assert now.status is (Status.WAITING if not kv_tokens else Status.SUSPENDED)


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 4), (4, 1), (2, 3)])
def test_kv_goes_to_whatever_nodes_there_are(tmp_path, before, after):
    old = Job(tmp_path, before)
    held = [old.decode(key, 100 + 30 * key) for key in range(6)]
    assert old.leave()
    new = Job(tmp_path, after, seed=1)
    restored = new.restore()
    for s in held:
        assert_goes_on(new, s, restored[s.id], s.length - 1)
        node = new.engine.node[s.id]
        assert new.nodes.bytes_of(node, restored[s.id]) == old.nodes.bytes_of(old.nodes.node_of(s.id), s)
    assert len(set(new.engine.node.values())) == after
    assert "restored 6 sequences" in new.said[-1]


def test_kv_that_does_not_fit_is_left_to_be_recomputed(tmp_path):
    old = Job(tmp_path, 2)
    held = [old.decode(key, 300) for key in range(6)]
    old.leave()
    new = Job(tmp_path, 1, pages=12)
    restored = new.restore()
    assert sorted(s.kv_length for s in restored.values()) == [0, 0, 0, 0, 299, 299]
    assert all(restored[s.id].output == s.output for s in held)


def test_a_periodic_checkpoint_has_the_kv_of_every_node(tmp_path):
    old = Job(tmp_path, 3)
    held = [old.decode(key, 200) for key in range(5)]
    old.save_periodically()
    new = Job(tmp_path, 1, seed=1)
    restored = new.restore()
    for s in held:
        assert_goes_on(new, s, restored[s.id], 199)
        assert new.nodes.bytes_of(0, restored[s.id]) == old.nodes.bytes_of(old.nodes.node_of(s.id), s)
    old.events.flush()
    (saved,) = [event for event in read_events(tmp_path / "events.jsonl") if event["event"] == "checkpoint"]
    assert saved["pages"] == 20 and saved["stall"] >= 0


def test_pages_that_change_hands_while_they_are_written_are_not_believed(tmp_path):
    old = Job(tmp_path, 2)
    held = [old.decode(key, 200) for key in range(4)]
    old.now += 600
    old.recovery.save_if_due(old.engine, old.results)
    held[0].pages = list(held[0].pages)  # discarded, computed again and by chance in the same pages
    del old.engine.held[3]  # finished
    old.written()
    restored = Job(tmp_path, 1).restore()
    assert [restored[key].kv_length for key in range(4)] == [0, 199, 199, 0]
    assert restored[3].output == held[3].output


def test_kv_of_a_sequence_on_a_device_is_not_trusted_while_it_runs(tmp_path):
    old = Job(tmp_path, 1)
    old.nodes.in_place = False
    old.decode(0, 200).status = Status.ACTIVE
    old.decode(1, 200)
    old.save_periodically()
    restored = Job(tmp_path, 1).restore()
    assert [restored[key].kv_length for key in range(2)] == [0, 199]


def test_without_time_only_tokens_are_saved_and_kv_from_before_still_serves(tmp_path):
    old = Job(tmp_path, 2)
    s = old.decode(0, 200)
    old.decode(1, 200)
    old.save_periodically()
    s.output.extend(range(80))
    s.kv_length += 80
    assert old.leave(deadline=old.now)
    restored = Job(tmp_path, 1).restore()
    assert restored[0].length == 280
    assert [restored[key].kv_length for key in range(2)] == [199, 199]
    assert restored[0].status is Status.PREFILLING


def test_samples_that_wait_for_others_of_their_request_are_kept(tmp_path):
    old = Job(tmp_path, 1)
    old.decode(0, 100)
    done = Sequence(
        1, 0, 1, array("I", [1]), SamplingParams(max_tokens=9), array("I", [2]), Status.FINISHED, finish_reason="stop"
    )
    old.results.finish(done)
    old.leave()
    new = Job(tmp_path, 2)
    new.restore()
    assert [s.sample for s in new.results.ended] == [1]
    assert list(new.engine.held) == [0]


def fill_disk(monkeypatch, file):
    """Writing to files of that name fails, as on a full disk."""
    write = os.pwrite

    def full(fd, data, offset):
        if file in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full)


def test_a_full_disk_on_one_node_is_warned_of_and_tried_again_soon(tmp_path, monkeypatch):
    job = Job(tmp_path, 2)
    job.decode(0, 200)
    job.save_periodically()
    with monkeypatch.context() as patch:
        fill_disk(patch, "node-00001")
        job.save_periodically()
    assert epochs(job.directory) == [1]
    assert "No space left on device. The run goes on, and tries again in 30 s" in job.said[-1]
    job.now += FIRST_RETRY
    job.recovery.save_if_due(job.engine, job.results)
    job.written()
    assert epochs(job.directory) == [3, 1]
    assert Job(tmp_path, 1).restore()[0].kv_length == 199


def test_a_full_disk_before_leaving_costs_the_kv_and_not_the_tokens(tmp_path, monkeypatch):
    job = Job(tmp_path, 2)
    job.decode(0, 200)
    with monkeypatch.context() as patch:
        fill_disk(patch, "node-00001")
        assert job.leave()
    assert "The tokens are saved, their KV is not" in job.said[-1]
    restored = Job(tmp_path, 2).restore()
    assert (restored[0].length, restored[0].kv_length) == (200, 0)


def test_a_periodic_checkpoint_under_way_does_not_hold_up_the_last_one(tmp_path):
    job = Job(tmp_path, 2)
    s = job.decode(0, 200)
    job.now += 600
    job.recovery.save_if_due(job.engine, job.results)
    s.output.append(5)
    assert job.leave(deadline=job.now + 5)
    restored = Job(tmp_path, 1).restore()
    assert restored[0].length == 201


def test_the_rate_of_prefill_is_that_of_a_rank_over_all_jobs(tmp_path):
    assert prefill_rate(tmp_path / "events.jsonl") is None
    for ranks, tokens in ((4, 800), (1, 300)):
        with EventLog(tmp_path / "events.jsonl", ranks=ranks) as events:
            events.step("prefill", tokens, 1.0)
            events.step("decode", 9999, 1.0)
    assert prefill_rate(tmp_path / "events.jsonl") == pytest.approx(1100 / 5)
