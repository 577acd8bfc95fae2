"""The C++ kernels for every instruction set that this machine can run, and for AMX in emulation."""

from functools import cache
from pathlib import Path

import pytest

from hpcgen.kernels.native.build import build
from hpcgen.kernels.native.isa import ISAS, Isa, cpu_flags
from hpcgen.kernels.native.library import NativeLibrary

_AVX2 = ISAS[-1]
_EMULATION = Path(__file__).with_name("amx_emulation.h")
EMULATED_AMX = Isa("amx-emulated", (*_AVX2.compiler_flags, f'-DHPCGEN_AMX_EMULATION="{_EMULATION}"'), _AVX2.cpu_flags)
ALL_ISAS = (*ISAS, EMULATED_AMX)


@cache
def _library(isa: Isa) -> NativeLibrary:
    return NativeLibrary(build(isa), isa.name)


def library_or_skip(name: str) -> NativeLibrary:
    isa = next(isa for isa in ALL_ISAS if isa.name == name)
    if missing := isa.cpu_flags - cpu_flags():
        pytest.skip(f"this CPU has no {', '.join(sorted(missing))}")
    return _library(isa)


every_isa = pytest.mark.parametrize("isa", [isa.name for isa in ALL_ISAS])
