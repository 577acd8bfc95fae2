"""Builds the C++ kernels with the compiler of the machine, once: the library is kept in the user's cache.

The sources include nothing of Python or torch, so a build takes seconds and its result fits any version of them.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpcgen.kernels.native.isa import Isa

SOURCES = Path(__file__).parent
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-strict-aliasing",  # the kernels look at pairs of bf16 as 32-bit units
    "-fvisibility=default",
)


class BuildFailed(Exception):
    """Says in one line why there is no library."""


def build(isa: Isa) -> Path:
    """Path of the shared library for `isa`, built now if it never was. Raises BuildFailed.

    Processes that ask at the same time wait for the first of them; where the file system has no locks each builds its
    own, and the last rename wins.
    """
    prebuilt = SOURCES / f"{isa.name}.so"
    if prebuilt.exists():
        return prebuilt
    compiler = _compiler()
    library = library_directory() / f"{isa.name}-{_fingerprint(compiler, isa)}.so"
    if library.exists():
        return library
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with _locked(library.with_suffix(".lock")):
            if not library.exists():
                _compile(compiler, isa, library)
    except OSError as error:
        raise BuildFailed(f"cannot write to {library.parent}: {error.strerror or error}") from error
    return library


def library_directory() -> Path:
    """Where libraries are kept."""
    root = os.environ.get("HPCGEN_CACHE")
    if root:
        return Path(root) / "kernels"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hpcgen" / "kernels"


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and shutil.which(name.split()[0]):
            return name
    raise BuildFailed("no C++ compiler found (set CXX, or load the compiler module of your cluster)")


def _fingerprint(compiler: str, isa: Isa) -> str:
    digest = hashlib.sha256()
    for source in sorted(SOURCES.glob("*.cpp")) + sorted(SOURCES.glob("*.h")):
        digest.update(source.name.encode() + source.read_bytes())
    version = subprocess.run([*compiler.split(), "--version"], capture_output=True, text=True, check=False).stdout
    digest.update("\0".join([version, *FLAGS, *isa.compiler_flags]).encode())
    return digest.hexdigest()[:16]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            yield
            return
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def _compile(compiler: str, isa: Isa, library: Path) -> None:
    """All sources at once, each by its own compiler process; the library appears under its name only when complete."""
    with tempfile.TemporaryDirectory(dir=library.parent) as directory:
        command = [*compiler.split(), *FLAGS, *isa.compiler_flags]
        objects = {source: Path(directory) / f"{source.stem}.o" for source in sorted(SOURCES.glob("*.cpp"))}
        processes = [
            subprocess.Popen([*command, "-c", str(source), "-o", str(object_file)], stderr=subprocess.PIPE, text=True)
            for source, object_file in objects.items()
        ]
        errors = [process.communicate()[1] for process in processes]
        for process, error in zip(processes, errors, strict=True):
            _check(process.returncode, compiler, error)
        made = Path(directory) / library.name
        linked = subprocess.run(
            [*command, "-shared", *map(str, objects.values()), "-o", str(made)],
            capture_output=True,
            text=True,
            check=False,
        )
        _check(linked.returncode, compiler, linked.stderr)
        made.replace(library)


def _check(returncode: int, compiler: str, error: str) -> None:
    if returncode:
        reason = next((line for line in error.splitlines() if "error" in line), error.strip() or "no message")
        raise BuildFailed(f"{compiler} failed: {reason}")
