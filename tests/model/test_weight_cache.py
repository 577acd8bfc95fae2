"""The first use converts, later ones find the file; nothing that dies or runs at the same time can spoil that."""

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hpcgen.model.weight_cache import cache_directory, cached_weight_file
from hpcgen.model.weight_file import WeightFile
from hpcgen.model.weight_format import WeightFileError
from hpcgen.model.weight_verify import verify

from .checkpoints import edit_config
from .converting import converters, start_conversion
from .tiny_models import save_tiny


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_tiny("llama", tmp_path / "model", torch.bfloat16)
    return tmp_path / "model"


@pytest.fixture(autouse=True)
def _importable(monkeypatch) -> None:
    """Other processes import this package of tests too."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def leftovers(cache: Path) -> list[str]:
    return [file.name for file in cache.iterdir() if file.suffix != ".safetensors"]


def test_the_second_use_does_not_convert(model: Path, tmp_path: Path) -> None:
    reports: list[tuple] = []
    first = cached_weight_file(model, cache=tmp_path / "cache", progress=lambda *report: reports.append(report))
    converted = len(reports)
    second = cached_weight_file(model, cache=tmp_path / "cache", progress=lambda *report: reports.append(report))
    assert first == second
    assert len(reports) == converted > 0
    assert leftovers(tmp_path / "cache") == []


def test_the_dtype_of_the_configuration_and_the_same_one_asked_for_share_a_file(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert cached_weight_file(model, cache=cache) == cached_weight_file(model, torch.bfloat16, cache=cache)
    assert cached_weight_file(model, cache=cache) != cached_weight_file(model, torch.float32, cache=cache)


def test_a_changed_checkpoint_is_converted_again(model: Path, tmp_path: Path) -> None:
    first = cached_weight_file(model, cache=tmp_path / "cache")
    save_tiny("llama", model, torch.bfloat16, seed=1)
    second = cached_weight_file(model, cache=tmp_path / "cache")
    edit_config(model, rope_theta=500000.0)
    third = cached_weight_file(model, cache=tmp_path / "cache")
    assert len({first, second, third}) == 3
    name = "model.layers.0.mlp.up_proj.weight"
    assert WeightFile(first).checksum(name) != WeightFile(second).checksum(name)


def test_a_cut_off_file_in_the_cache_is_replaced(model: Path, tmp_path: Path) -> None:
    path = cached_weight_file(model, cache=tmp_path / "cache")
    os.truncate(path, path.stat().st_size - 4096)
    assert verify(cached_weight_file(model, cache=tmp_path / "cache")) == []


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HPCGEN_CACHE", str(tmp_path / "a"))
    assert cache_directory() == tmp_path / "a"
    monkeypatch.delenv("HPCGEN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert cache_directory() == tmp_path / "b" / "hpcgen"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache" / "hpcgen"


def test_a_cache_that_cannot_be_written_names_the_remedy(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WeightFileError, match="Set HPCGEN_CACHE"):
        cached_weight_file(model, cache=tmp_path / "file")


def test_a_failed_conversion_leaves_nothing_behind(model: Path, tmp_path: Path) -> None:
    def fail(done: int, total: int, name: str) -> None:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        cached_weight_file(model, cache=tmp_path / "cache", progress=fail)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_conversion_killed_at_any_moment_never_leaves_a_wrong_file(model: Path, tmp_path: Path) -> None:
    cache, log = tmp_path / "cache", tmp_path / "log"
    moments = random.Random(0)
    for _ in range(6):
        before = log.stat().st_size if log.exists() else 0
        process = start_conversion(model, cache, 0.005, log)
        wait_until(lambda before=before: log.exists() and log.stat().st_size > before)
        time.sleep(moments.uniform(0, 0.15))
        process.kill()
        process.join()
        assert list(cache.glob("*.safetensors")) == []
    assert any(name.endswith(".partial") for name in leftovers(cache))
    path = cached_weight_file(model, cache=cache)
    assert verify(path) == []
    assert leftovers(cache) == []


def test_of_two_conversions_at_once_one_waits_for_the_others_file(model: Path, tmp_path: Path) -> None:
    cache, log = tmp_path / "cache", tmp_path / "log"
    processes = [start_conversion(model, cache, 0.01, log) for _ in range(2)]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert len(converters(log)) == 1
    assert [verify(file) for file in cache.iterdir()] == [[]]


def test_a_waiting_conversion_takes_over_from_one_that_is_killed(model: Path, tmp_path: Path) -> None:
    cache, log = tmp_path / "cache", tmp_path / "log"
    doomed = start_conversion(model, cache, 60, log)
    wait_until(lambda: converters(log))
    messages: list[str] = []

    def kill(message: str) -> None:
        messages.append(message)
        doomed.kill()
        doomed.join()

    path = cached_weight_file(model, cache=cache, waiting=kill)
    assert f"process {doomed.pid} on" in messages[0]
    assert verify(path) == []
    assert leftovers(cache) == []
