from pathlib import Path

import pytest

from hpcgen.memory.host_capacity import _cgroup_headroom, available_bytes


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("membership", "files"),
    [
        ("0::/job/step\n", {"job/step/memory.max": "max", "job/memory.max": "1000", "job/memory.current": "400"}),
        (
            "9:memory:/slurm/job\n1:cpu:/\n",
            {"memory/slurm/job/memory.limit_in_bytes": "1000", "memory/slurm/job/memory.usage_in_bytes": "400"},
        ),
    ],
    ids=["version 2, limit of the parent", "version 1"],
)
def test_the_limit_of_a_cgroup_counts(tmp_path: Path, membership: str, files: dict[str, str]) -> None:
    write(tmp_path / "membership", membership)
    for name, text in files.items():
        write(tmp_path / "root" / name, text)
    assert _cgroup_headroom(tmp_path / "root", tmp_path / "membership") == [600]


def test_this_machine_has_some_memory() -> None:
    assert available_bytes() > 2**20
