"""Caches of tests: the weight files in them are their own, the C++ library is that of the whole suite."""

from pathlib import Path

from hpcgen.kernels.native.build import library_directory

_LIBRARIES = library_directory()
"""As the environment of the suite has it, before a test changes that."""


def own_cache(directory: Path) -> str:
    """Value of HPCGEN_CACHE for a directory, made if need be."""
    libraries = directory / "kernels"
    _LIBRARIES.mkdir(parents=True, exist_ok=True)
    if not libraries.exists():
        directory.mkdir(parents=True, exist_ok=True)
        libraries.symlink_to(_LIBRARIES)
    return str(directory)
