import pytest

from hpcgen.checkpoint import CheckpointWriter, commit, show
from hpcgen.checkpoint.manifest import node_path
from hpcgen.checkpoint.show import NoCheckpoint
from tests.checkpoint.sequences import LAYOUT, Store, sequence


@pytest.fixture
def directory(tmp_path):
    store = Store()
    directory = tmp_path / "run" / "checkpoints"
    writer = CheckpointWriter(directory, layout=LAYOUT)
    commit(directory, 1, [writer.write(1, [sequence(1, 100, 20, store), sequence(2, 300, 10)], store.read)])
    return directory


def test_a_directory_shows_its_newest_epoch(directory):
    text = show(directory)
    assert "epoch 1" in text
    assert "2 sequences of 2 requests: 2 active" in text
    assert "370 prompt, 30 generated" in text
    assert "KV: of 99 of 398 tokens, in 2 pages" in text


def test_a_run_directory_stands_for_its_checkpoints(directory):
    assert show(directory.parent) == show(directory)


def test_a_run_of_several_instances_shows_the_checkpoints_of_each(tmp_path):
    for name in ("a", "b"):
        directory = tmp_path / "instances" / name / "checkpoints"
        commit(directory, 7, [CheckpointWriter(directory, layout=LAYOUT).write(7, [sequence(1)])])
    text = show(tmp_path)
    assert "instances/a/checkpoints:\nepoch 7" in text
    assert "instances/b/checkpoints:\nepoch 7" in text


def test_a_file_shows_its_datasets(directory):
    text = show(node_path(directory, 1, 0))
    assert "sequences/prompt/values" in text
    assert "[2, 1024]" in text
    assert "page_layout.layers = 2" in text


def test_a_damaged_epoch_is_named(directory):
    node_path(directory, 1, 0).write_bytes(b"x")
    text = show(directory)
    assert "warning: checkpoint epoch 1 is damaged" in text
    assert "no epoch is whole" in text


def test_what_is_no_checkpoint_is_one_clear_message(tmp_path):
    (tmp_path / "x.h5").write_bytes(b"nothing")
    for path in (tmp_path, tmp_path / "absent", tmp_path / "x.h5"):
        with pytest.raises(NoCheckpoint, match=str(path)):
            show(path)
