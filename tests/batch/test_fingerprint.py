import json
import os
import shutil

import pytest

from hpcgen.batch.fingerprint import ModelDirectoryError, model_fingerprint


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (directory / "model.safetensors").write_bytes(bytes(5 * 2**20))
    (directory / "README.md").write_text("read me")
    return directory


def test_a_copy_is_the_same_model_whatever_its_times(model, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    os.utime(copy / "model.safetensors", (0, 0))
    assert model_fingerprint(copy) == model_fingerprint(model)


def test_a_file_that_does_not_matter_does_not_count(model):
    before = model_fingerprint(model)
    (model / "README.md").write_text("changed")
    assert model_fingerprint(model) == before


@pytest.mark.parametrize("place", [0, 5 * 2**20 // 2, 5 * 2**20 - 1])
def test_changed_weights_are_another_model(model, place):
    before = model_fingerprint(model)
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(place)
        file.write(b"\x01")
    assert model_fingerprint(model) != before


def test_a_changed_configuration_or_another_file_of_weights_is_another_model(model):
    before = model_fingerprint(model)
    (model / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    changed = model_fingerprint(model)
    (model / "model-2.safetensors").write_bytes(b"")
    assert len({before, changed, model_fingerprint(model)}) == 3


def test_a_directory_that_is_no_model_is_one_clear_error(tmp_path):
    with pytest.raises(ModelDirectoryError, match=r"has no config\.json"):
        model_fingerprint(tmp_path)
