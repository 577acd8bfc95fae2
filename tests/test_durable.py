import json
import stat

import pytest

from hpcgen.durable import write_atomically, write_json


def test_the_file_appears_whole_and_private(tmp_path):
    path = tmp_path / "file"
    with write_atomically(path) as file:
        file.write(b"content")
        assert not path.exists()
    assert path.read_bytes() == b"content"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), write_atomically(path) as file:
        file.write(b"new")
        raise ZeroDivisionError
    assert [(entry.name, entry.read_bytes()) for entry in tmp_path.iterdir()] == [("file", b"old")]


def test_json_is_readable(tmp_path):
    write_json(tmp_path / "a.json", {"a": [1, None]})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": [1, None]}
