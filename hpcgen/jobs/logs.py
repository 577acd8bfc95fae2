"""The logs of a run's jobs: what its ranks printed."""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from hpcgen.errors import HpcgenError
from hpcgen.jobs.submission import jobs_directory

_LOG = re.compile(r"(?P<job>\d+(?:_\d+)?)_(?P<rank>\d+)_log\.out")
POLL_SECONDS = 0.5


class NoLogs(HpcgenError):
    """The run has no log of that kind."""


def log_files(run_directory: Path, rank: int = 0) -> list[Path]:
    """Logs of one rank in all jobs and instances of a run, the job submitted last at the end."""
    matches = ((path, _LOG.fullmatch(path.name)) for path in jobs_directory(run_directory).glob("*_log.out"))
    own = [(path, match["job"]) for path, match in matches if match and int(match["rank"]) == rank]
    return [path for path, job in sorted(own, key=lambda item: tuple(map(int, item[1].split("_"))))]


def show(run_directory: Path, out: TextIO, rank: int = 0, tail: int | None = None) -> dict[Path, int]:
    """Writes the logs, each under its name where there are several; the bytes of each that were shown.

    Args:
        tail: last lines of each; None: all.

    Raises:
        NoLogs: there is none.
    """
    files = log_files(run_directory, rank)
    if not files:
        raise NoLogs(f"{run_directory} has no log of rank {rank}: no job of it has started yet")
    shown: dict[Path, int] = {}
    for path in files:
        data = path.read_bytes()
        shown[path] = len(data)
        if len(files) > 1:
            out.write(f"==> {path.name} <==\n")
        lines = data.decode(errors="replace").splitlines(keepends=True)
        out.writelines(lines if tail is None else lines[-tail:])
    out.flush()
    return shown


def follow(
    run_directory: Path,
    out: TextIO,
    shown: dict[Path, int],
    over: Callable[[], bool],
    rank: int = 0,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Writes what is added to the logs, and new logs, until `over` says that no job will write any more."""
    last = list(shown)[-1] if shown else None
    while True:
        finished = over()
        for path in log_files(run_directory, rank):
            start = shown.get(path, 0)
            with open(path, "rb") as file:
                file.seek(start)
                data = file.read()
            if not data:
                continue
            if path != last:
                out.write(f"==> {path.name} <==\n")
                last = path
            out.write(data.decode(errors="replace"))
            shown[path] = start + len(data)
        out.flush()
        if finished:
            return
        sleep(POLL_SECONDS)
