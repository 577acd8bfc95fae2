import json
import stat

import pytest

from hpcgen.batch import BatchInput, RunDirectory, RunDirectoryError
from hpcgen.batch.lock import LockedError

OPTIONS = {"seed": 1, "max_model_len": 64, "dtype": "bfloat16"}


@pytest.fixture
def requests(batch_input, completion):
    return batch_input([completion("a"), completion("b")])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs" / "first"


def test_a_new_directory_has_a_manifest_that_says_what_the_run_is(path, requests, model_directory):
    with RunDirectory(path).open(requests, model_directory, OPTIONS):
        manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["input"]["requests"] == 2
    assert manifest["input"]["sha256"] == requests.sha256
    assert manifest["options"] == OPTIONS
    assert manifest["model"]["path"] == str(model_directory)


def test_the_same_run_is_continued_under_the_same_id(path, requests, model_directory):
    ids = []
    for _ in range(2):
        with RunDirectory(path).open(requests, model_directory, OPTIONS) as run:
            ids.append(run.manifest.id)
    assert ids[0] == ids[1]


def test_different_runs_have_different_ids(path, tmp_path, requests, model_directory):
    with (
        RunDirectory(path).open(requests, model_directory, OPTIONS) as first,
        RunDirectory(tmp_path / "second").open(requests, model_directory, OPTIONS) as second,
    ):
        assert first.manifest.id != second.manifest.id


def test_another_input_is_refused(path, requests, model_directory, tmp_path):
    RunDirectory(path).open(requests, model_directory, OPTIONS).close()
    other = tmp_path / "other.jsonl"
    other.write_text("{}\n")
    with pytest.raises(RunDirectoryError, match=r"input .*other.jsonl.* is not the one .*use a new --run-dir"):
        RunDirectory(path).open(BatchInput(other), model_directory, OPTIONS)


def test_the_same_input_under_another_name_is_the_same(path, requests, model_directory, tmp_path):
    RunDirectory(path).open(requests, model_directory, OPTIONS).close()
    moved = requests.path.rename(tmp_path / "moved.jsonl")
    RunDirectory(path).open(BatchInput(moved), model_directory, OPTIONS).close()


def test_another_model_is_refused(path, requests, model_directory, tmp_path):
    RunDirectory(path).open(requests, model_directory, OPTIONS).close()
    other = tmp_path / "other-model"
    other.mkdir()
    (other / "config.json").write_text("{}")
    with pytest.raises(RunDirectoryError, match=r"the model in .*other-model is not the one"):
        RunDirectory(path).open(requests, other, OPTIONS)


def test_options_that_decide_the_results_are_compared_by_name(path, requests, model_directory):
    RunDirectory(path).open(requests, model_directory, OPTIONS).close()
    with pytest.raises(RunDirectoryError, match="dtype is 'float32', but was 'bfloat16'; seed is 2, but was 1"):
        RunDirectory(path).open(requests, model_directory, OPTIONS | {"seed": 2, "dtype": "float32"})


def test_a_refused_directory_is_left_unlocked(path, requests, model_directory):
    RunDirectory(path).open(requests, model_directory, OPTIONS).close()
    with pytest.raises(RunDirectoryError):
        RunDirectory(path).open(requests, model_directory, {})
    RunDirectory(path).open(requests, model_directory, OPTIONS).close()


def test_a_directory_in_use_is_refused_and_can_still_be_looked_at(path, requests, model_directory):
    with RunDirectory(path).open(requests, model_directory, OPTIONS) as run:
        with pytest.raises(LockedError):
            RunDirectory(path).open(requests, model_directory, OPTIONS)
        assert RunDirectory(path).read_manifest() == run.manifest


def test_everything_in_it_is_its_owners_alone(path, requests, model_directory):
    with RunDirectory(path).open(requests, model_directory, OPTIONS) as run:
        run.mark_complete({})
        modes = {entry: stat.S_IMODE(entry.stat().st_mode) for entry in [path, *path.rglob("*")]}
    assert all(mode == (0o700 if entry.is_dir() else 0o600) for entry, mode in modes.items())


def test_what_a_killed_process_was_writing_is_removed(path, requests, model_directory):
    RunDirectory(path).open(requests, model_directory, OPTIONS).close()
    leftover = path / "outputs" / "sub_batches" / ".000000.jsonl.1234.part"
    leftover.write_bytes(b"half a li")
    RunDirectory(path).open(requests, model_directory, OPTIONS).close()
    assert not leftover.exists()


def test_it_is_complete_when_marked_so(path, requests, model_directory):
    with RunDirectory(path).open(requests, model_directory, OPTIONS) as run:
        assert not run.is_complete
        run.mark_complete({"completed": 2})
    assert RunDirectory(path).is_complete
    assert json.loads((path / "SUCCESS").read_text()) == {"completed": 2}


def test_a_directory_that_is_none_is_one_clear_error(tmp_path):
    with pytest.raises(RunDirectoryError, match="is not a run directory"):
        RunDirectory(tmp_path).read_manifest()


def test_a_place_that_cannot_be_written_is_one_clear_error(tmp_path, requests, model_directory):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match="cannot write the run directory"):
        RunDirectory(tmp_path / "file" / "run").open(requests, model_directory, OPTIONS)


@pytest.mark.parametrize("content", ["{", '{"format": 1}', "[]"])
def test_a_broken_manifest_is_one_clear_error(path, content):
    path.mkdir(parents=True)
    (path / "manifest.json").write_text(content)
    with pytest.raises(RunDirectoryError, match="cannot read"):
        RunDirectory(path).read_manifest()


def test_a_manifest_of_another_version_is_refused(path, requests, model_directory):
    RunDirectory(path).open(requests, model_directory, OPTIONS).close()
    manifest = json.loads((path / "manifest.json").read_text()) | {"format": 99}
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RunDirectoryError, match="another version"):
        RunDirectory(path).open(requests, model_directory, OPTIONS)
