"""Instruction sets that the C++ kernels are built for, and which of them this machine has."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from hpcgen.errors import HpcgenError


class UnusableIsa(HpcgenError):
    """HPCGEN_ISA names an instruction set that does not exist or that this CPU does not have."""


@dataclass(frozen=True)
class Isa:
    name: str
    compiler_flags: tuple[str, ...]
    """As GCC and Clang spell them."""
    cpu_flags: frozenset[str]
    """As /proc/cpuinfo spells them."""


_AVX2 = Isa("avx2", ("-mavx2", "-mfma"), frozenset({"avx2", "fma"}))
_AVX512 = Isa(
    "avx512",
    (*_AVX2.compiler_flags, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"),
    _AVX2.cpu_flags | {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
)
_AVX512_BF16 = Isa("avx512_bf16", (*_AVX512.compiler_flags, "-mavx512bf16"), _AVX512.cpu_flags | {"avx512_bf16"})
_AMX = Isa(
    "amx",
    (*_AVX512_BF16.compiler_flags, "-mamx-tile", "-mamx-bf16"),
    _AVX512_BF16.cpu_flags | {"amx_tile", "amx_bf16"},
)
ISAS = (_AMX, _AVX512_BF16, _AVX512, _AVX2)
"""The fastest first."""


def cpu_flags() -> frozenset[str]:
    """Flags that the kernel reports for this CPU; none where it is no x86-64 or no Linux."""
    cpuinfo = Path("/proc/cpuinfo")
    if platform.machine() not in ("x86_64", "AMD64") or not cpuinfo.exists():
        return frozenset()
    for line in cpuinfo.read_text().splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def usable_isas(flags: frozenset[str]) -> list[Isa]:
    """Instruction sets that a CPU with `flags` has, the fastest first; only the one in HPCGEN_ISA where that is set.

    HPCGEN_ISA=none gives an empty list: no C++. Raises UnusableIsa for a name that cannot be.
    """
    usable = [isa for isa in ISAS if isa.cpu_flags <= flags]
    forced = os.environ.get("HPCGEN_ISA")
    if not forced:
        return usable
    if forced == "none":
        return []
    named = [isa for isa in usable if isa.name == forced]
    if not named:
        names = ", ".join([*(isa.name for isa in usable), "none"])
        raise UnusableIsa(f"HPCGEN_ISA={forced} cannot be used on this CPU: choose one of {names}, or unset it.")
    return named
