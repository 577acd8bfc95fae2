import pytest

from hpcgen.kernels.native.isa import ISAS, UnusableIsa, usable_isas

EVERYTHING = ISAS[0].cpu_flags
MILAN = frozenset({"avx2", "fma", "sse4_2"})


@pytest.fixture(autouse=True)
def not_forced(monkeypatch):
    monkeypatch.delenv("HPCGEN_ISA", raising=False)


def names(flags):
    return [isa.name for isa in usable_isas(frozenset(flags))]


def test_the_fastest_comes_first():
    assert names(EVERYTHING) == ["amx", "avx512_bf16", "avx512", "avx2"]
    assert names(EVERYTHING - {"amx_bf16"}) == ["avx512_bf16", "avx512", "avx2"]
    assert names(MILAN) == ["avx2"]


def test_a_cpu_without_avx2_has_none():
    assert names({"sse4_2"}) == []


def test_one_can_be_forced(monkeypatch):
    monkeypatch.setenv("HPCGEN_ISA", "avx512")
    assert names(EVERYTHING) == ["avx512"]
    monkeypatch.setenv("HPCGEN_ISA", "none")
    assert names(EVERYTHING) == []


@pytest.mark.parametrize("name", ["amx", "sse"])
def test_forcing_one_that_the_cpu_lacks_names_those_it_has(monkeypatch, name):
    monkeypatch.setenv("HPCGEN_ISA", name)
    with pytest.raises(UnusableIsa, match="avx2, none"):
        usable_isas(MILAN)
