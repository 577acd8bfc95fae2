"""Names a process so that others, also on other nodes, can tell whether it still runs: for the files that it leaves."""

import os
import re
import socket
from functools import cache
from pathlib import Path

_SEPARATOR = "~"  # not in a host name


def own_identity() -> str:
    """Host, process-id namespace, process id and start time of this process; fit for a file name."""
    pid = os.getpid()
    return _SEPARATOR.join([*_machine(), str(pid), _start_time(pid) or "0"])


def is_dead(identity: str) -> bool | None:
    """True or False for a process of this machine; None for one of which this machine cannot know."""
    machine, pid, started = _parts(identity)
    if machine != _machine() or not pid.isdigit():
        return None
    # The start time tells a process from a later one that was given its number.
    return _start_time(int(pid)) != started


def describe(identity: str) -> str:
    """For a message: 'process 123 on node7'."""
    machine, pid, _ = _parts(identity)
    return f"process {pid} on {machine[0]}"


def _parts(identity: str) -> tuple[tuple[str, str], str, str]:
    """((host, namespace), process id, start time); '?' for what is not there."""
    host, namespace, pid, started = (identity.split(_SEPARATOR) + ["?"] * 4)[:4]
    return (host, namespace), pid, started


@cache
def _machine() -> tuple[str, str]:
    try:
        namespace = str(os.stat("/proc/self/ns/pid").st_ino)  # containers share a host name, but not process ids
    except OSError:
        namespace = "0"
    return re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname()), namespace


def _start_time(pid: int) -> str | None:
    """Clock ticks from boot to the start of a process; None if there is none, or only a zombie."""
    try:
        # The command name may hold spaces and parentheses; the fields after the last parenthesis are well-behaved.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
