import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hpcgen.kernels.native import build as module
from hpcgen.kernels.native import library as library_module
from hpcgen.kernels.native.build import BuildFailed, build
from hpcgen.kernels.native.isa import ISAS, cpu_flags
from tests.kernels.libraries import library_or_skip

AVX2 = ISAS[-1]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HPCGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A compiler that notes its calls and writes what it is asked for."""

    def make(body='echo x > "${@: -1}"'):
        script = tmp_path / "fake-c++"
        log = tmp_path / "calls"
        script.write_text(f'#!/bin/bash\n[ "$1" = --version ] && echo 1.0 && exit\necho "$@" >> {log}\n{body}\n')
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("CXX", str(script))
        return lambda: log.read_text().splitlines() if log.exists() else []

    return make


def test_a_library_is_built_once(cache, compiler):
    calls = compiler()
    first = build(AVX2)
    made = len(calls())
    assert build(AVX2) == first
    assert len(calls()) == made == len(list(module.SOURCES.glob("*.cpp"))) + 1


def test_another_instruction_set_or_compiler_is_another_library(cache, compiler, monkeypatch):
    compiler()
    first = build(AVX2)
    assert build(ISAS[0]) != first
    monkeypatch.setattr(module, "FLAGS", (*module.FLAGS, "-g"))
    assert build(AVX2) != first


def test_a_failing_build_says_the_compilers_error_and_leaves_nothing(cache, compiler):
    compiler("echo 'x.cpp:1: error: no such thing' >&2; exit 1")
    with pytest.raises(BuildFailed, match="no such thing"):
        build(AVX2)
    assert not list(cache.glob("*.so"))


def test_a_machine_without_a_compiler_is_told_so(cache, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(BuildFailed, match="no C\\+\\+ compiler"):
        build(AVX2)


def test_a_cache_that_cannot_be_written_is_named(tmp_path, compiler, monkeypatch):
    compiler()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HPCGEN_CACHE", str(tmp_path / "file"))
    with pytest.raises(BuildFailed, match="cannot write"):
        build(AVX2)


def test_processes_that_build_at_once_all_get_a_whole_library(cache, compiler):
    compiler('sleep 0.1; echo x > "${@: -1}"')
    program = "from hpcgen.kernels.native import build, isa; print(build.build(isa.ISAS[-1]))"
    processes = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=dict(os.environ))
        for _ in range(3)
    ]
    paths = {process.communicate(timeout=60)[0].strip() for process in processes}
    assert len(paths) == 1
    assert Path(paths.pop()).read_text() == "x\n"


def test_without_a_library_there_is_one_note_that_names_the_reason(cache, monkeypatch, caplog):
    if not AVX2.cpu_flags <= cpu_flags():
        pytest.skip("this CPU has no AVX2: nothing is built")
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("HPCGEN_ISA", raising=False)
    library_module.native_library.cache_clear()
    try:
        assert library_module.native_library() is None
        assert library_module.native_library() is None
    finally:
        library_module.native_library.cache_clear()
    assert len(caplog.records) == 1
    assert "no C++ compiler found" in caplog.text


def test_products_in_registers_are_counted():
    library = library_or_skip("avx2")
    assert library.peak_products(200) == 2 * library.peak_products(100) > 0
