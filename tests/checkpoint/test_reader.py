import random

import pytest

from hpcgen.checkpoint import CheckpointReader, CheckpointWriter, DamagedCheckpoint, commit
from hpcgen.checkpoint.manifest import epochs, manifest_path, node_path
from hpcgen.checkpoint.reader import StoredPages
from tests.checkpoint.sequences import LAYOUT, PAGE_BYTES, Store, assert_equal, assert_kv, sequence


@pytest.fixture
def store():
    return Store()


def save(directory, epoch, sequences_by_node, store=None):
    files = [
        CheckpointWriter(directory, node, layout=LAYOUT).write(epoch, sequences, store.read if store else None)
        for node, sequences in enumerate(sequences_by_node)
    ]
    return commit(directory, epoch, files)


def latest(directory, layout=LAYOUT):
    warnings = []
    return CheckpointReader(directory, warnings.append).latest(layout), warnings


def loads(files, kv, index, expected):
    """Whether a page can be loaded; it then has the expected bytes."""
    buffer = bytearray(PAGE_BYTES)
    try:
        files.load(kv, index, memoryview(buffer))
    except DamagedCheckpoint:
        return False
    assert bytes(buffer) == expected.tobytes()
    return True


def grow(old, length, store):
    """The sequence of `old` after more steps."""
    new = sequence(old.request, length, output=length - len(old.prompt))
    new.kv_length = length - 1
    new.pages = old.pages + store.take(-(-new.kv_length // 64) - len(old.pages))
    return new


def test_an_empty_or_absent_directory_has_no_checkpoint(tmp_path):
    assert latest(tmp_path) == (None, [])
    assert latest(tmp_path / "absent") == (None, [])


def test_the_parts_of_all_nodes_come_together_in_the_order_of_arrival(tmp_path, store):
    nodes = [[sequence(4, store=store), sequence(1, store=store)], [sequence(3, store=store)], []]
    save(tmp_path, 1, nodes, store)
    checkpoint, _ = latest(tmp_path)
    assert [s.id for s in checkpoint.sequences] == [1, 3, 4]
    for s in (*nodes[0], *nodes[1]):
        assert_kv(checkpoint, s, store, 99)


def test_only_the_newest_epochs_are_kept(tmp_path, store):
    for epoch in range(1, 6):
        save(tmp_path, epoch, [[sequence(epoch, store=store)]], store)
    assert epochs(tmp_path) == [5, 4]
    assert len(list(tmp_path.iterdir())) == 4


def test_an_epoch_without_a_manifest_is_passed_over_and_later_removed(tmp_path):
    save(tmp_path, 1, [[sequence(1)]])
    CheckpointWriter(tmp_path, layout=LAYOUT).write(2, [sequence(2)])
    checkpoint, warnings = latest(tmp_path)
    assert checkpoint.epoch == 1
    assert warnings == ["checkpoint epoch 2 was not finished; an earlier one is used"]
    save(tmp_path, 3, [[sequence(3)]])
    assert epochs(tmp_path) == [3, 1]
    assert not node_path(tmp_path, 2, 0).exists()


@pytest.mark.parametrize("victim", ["first node", "second node", "manifest"])
def test_a_truncated_file_makes_the_previous_epoch_the_one(tmp_path, victim):
    for epoch in (1, 2):
        save(tmp_path, epoch, [[sequence(epoch)], [sequence(10 + epoch)]])
    path = {
        "first node": node_path(tmp_path, 2, 0),
        "second node": node_path(tmp_path, 2, 1),
        "manifest": manifest_path(tmp_path, 2),
    }[victim]
    whole = path.read_bytes()
    for keep in (0, 1, len(whole) // 2, len(whole) - 2):
        path.write_bytes(whole[:keep])
        checkpoint, warnings = latest(tmp_path)
        assert [s.id for s in checkpoint.sequences] == [1, 11]
        assert len(warnings) == 1
        assert "epoch 2 is damaged" in warnings[0]


def test_a_missing_file_makes_the_previous_epoch_the_one(tmp_path):
    for epoch in (1, 2):
        save(tmp_path, epoch, [[sequence(epoch)]])
    node_path(tmp_path, 2, 0).unlink()
    assert latest(tmp_path)[0].epoch == 1


def test_nothing_is_restored_where_all_epochs_are_damaged(tmp_path):
    save(tmp_path, 1, [[sequence(1)]])
    node_path(tmp_path, 1, 0).write_bytes(b"")
    checkpoint, warnings = latest(tmp_path)
    assert checkpoint is None
    assert len(warnings) == 1


def test_a_flipped_byte_is_found_wherever_it_is(tmp_path, store):
    """Either the epoch is refused, or only pages are lost; never is anything wrong returned."""
    first, second = [sequence(1, 100, store=store)], [sequence(1, 100, 60), sequence(2, 300, store=store)]
    save(tmp_path, 1, [first])
    save(tmp_path, 2, [second], store)
    path = node_path(tmp_path, 2, 0)
    whole = path.read_bytes()
    chosen = random.Random(0)
    refused = lost_pages = 0
    for position in [*range(64), *chosen.sample(range(len(whole)), 150)]:
        damaged = bytearray(whole)
        damaged[position] ^= 1 << chosen.randrange(8)
        path.write_bytes(damaged)
        checkpoint, warnings = latest(tmp_path)
        assert_equal(checkpoint.sequences, {1: first, 2: second}[checkpoint.epoch])
        refused += checkpoint.epoch == 1
        assert (checkpoint.epoch == 1) == bool(warnings)
        files = StoredPages()
        lost_pages += sum(
            not loads(files, kv, i, store.rows[second[1].pages[i]])
            for kv in checkpoint.kv.values()
            for i in range(len(kv.rows))
        )
        files.close()
    assert refused
    assert lost_pages


def test_kv_in_another_layout_is_recomputed(tmp_path, store):
    save(tmp_path, 1, [[sequence(1, store=store)]], store)
    checkpoint, warnings = latest(tmp_path, {**LAYOUT, "dtype": "bfloat16"})
    assert len(checkpoint.sequences) == 1
    assert checkpoint.kv == {}
    assert "another page layout" in warnings[0]


def test_tokens_saved_in_haste_use_the_kv_of_the_epochs_before(tmp_path, store):
    old = sequence(1, 100, store=store)
    save(tmp_path, 1, [[old]], store)
    for epoch, length in ((2, 150), (3, 160), (4, 170)):
        save(tmp_path, epoch, [[grow(old, length, store)]])
    assert epochs(tmp_path) == [4, 3, 1]
    checkpoint, _ = latest(tmp_path)
    assert checkpoint.sequences[0].length == 170
    assert_kv(checkpoint, old, store, 99)


def test_kv_of_a_lost_branch_serves_only_the_tokens_that_are_the_same(tmp_path, store):
    old = sequence(1, 300, 200, store=store)
    save(tmp_path, 1, [[old]], store)
    other = sequence(1, 300, 200)
    other.output[150 - len(other.prompt)] = 1
    save(tmp_path, 2, [[other]])
    assert_kv(latest(tmp_path)[0], old, store, 150)


def test_of_two_epochs_the_one_with_more_kv_serves(tmp_path, store):
    old = sequence(1, 100, store=store)
    save(tmp_path, 1, [[old]], store)
    new = grow(old, 300, store)
    save(tmp_path, 2, [[new]], store)
    checkpoint, _ = latest(tmp_path)
    assert_kv(checkpoint, new, store, 299)


def test_a_checkpoint_of_a_later_version_is_passed_over(tmp_path):
    save(tmp_path, 1, [[sequence(1)]])
    path = manifest_path(tmp_path, 1)
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    checkpoint, warnings = latest(tmp_path)
    assert checkpoint is None
    assert "version 2" in warnings[0]
