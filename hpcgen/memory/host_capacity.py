"""How much host memory this process may use: the least of what the machine has left and what its cgroup allows."""

from pathlib import Path

import psutil


def available_bytes() -> int:
    """Bytes that can still be used, in a Slurm job or a container too, whose limit is that of its cgroup."""
    return max(0, min([psutil.virtual_memory().available, *_cgroup_headroom()]))


def _cgroup_headroom(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> list[int]:
    """limit - usage of every memory cgroup that contains this process, version 1 or 2."""
    headroom = []
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit_name, usage_name = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit_name, usage_name = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        relative = Path(path.lstrip("/"))
        for directory in [relative, *relative.parents]:
            limit, usage = _number(base / directory / limit_name), _number(base / directory / usage_name)
            if limit is not None and usage is not None:
                headroom.append(limit - usage)
    return headroom


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None  # no such file, or 'max'
