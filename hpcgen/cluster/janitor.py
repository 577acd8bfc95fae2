"""Removes what killed ranks leave in /dev/shm: segments of the MPI library, and semaphores of worker processes.

Both have names while they are in use. A shell outside of the job's process group outlives the node's leader by the
moment that it takes to remove the files which that rank had mapped. Nothing else is touched.
"""

import subprocess
from collections.abc import Iterable
from pathlib import Path

_SCRIPT = 'while IFS= read -r f; do set -- "$@" "$f"; done; [ $# -eq 0 ] || rm -f -- "$@"'


class Janitor:
    """Started once on each node; it works when this process ends, however it ends."""

    def __init__(self) -> None:
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )

    def remove_at_end(self, files: Iterable[Path]) -> None:
        assert self._shell.stdin is not None
        self._shell.stdin.writelines(f"{path}\n".encode() for path in files)
        self._shell.stdin.flush()

    def close(self) -> None:
        """Removes the files now."""
        assert self._shell.stdin is not None
        self._shell.stdin.close()
        self._shell.wait()


def mapped_shared_files(directory: Path = Path("/dev/shm")) -> list[Path]:
    """Files in a directory of shared memory that this process has mapped and that still have names."""
    # By inode: a semaphore gets its name after it was mapped under another one.
    lines = Path("/proc/self/maps").read_text().splitlines()
    inodes = {int(line.split()[4]) for line in lines if f" {directory}/" in line}
    return sorted(path for path in directory.iterdir() if path.lstat().st_ino in inodes)
