from pathlib import Path

import pytest

from hpcgen.jobs.doctor.allotment import GIB, _limit, cores, memory
from hpcgen.jobs.doctor.check import Level


@pytest.mark.parametrize(
    ("allowed", "present", "threads", "level"),
    [(8, 64, "", Level.OK), (8, 64, "8", Level.OK), (8, 64, "64", Level.WARNING), (1, 64, "1", Level.WARNING),
     (1, 1, "", Level.OK)],
)  # fmt: skip
def test_one_core_of_many_or_more_threads_than_cores_is_a_warning(
    allowed: int, present: int, threads: str, level: Level
) -> None:
    assert cores(allowed, present, {"OMP_NUM_THREADS": threads}).level is level


def test_a_limit_far_below_the_memory_is_a_warning_with_the_remedy() -> None:
    check = memory(4 * GIB, 256 * GIB)
    assert check.level is Level.WARNING and "--mem" in check.remedy
    assert memory(200 * GIB, 256 * GIB).level is Level.OK
    assert memory(2**63, 256 * GIB).level is Level.OK


@pytest.mark.parametrize(
    ("line", "file"),
    [("0::/slurm/job_5/step_0", "slurm/job_5/memory.max"),
     ("4:memory:/slurm/job_5/step_0", "memory/slurm/job_5/memory.limit_in_bytes")],
)  # fmt: skip
def test_the_limit_of_a_group_above_counts_in_both_versions_of_control_groups(
    tmp_path: Path, line: str, file: str
) -> None:
    groups, root = tmp_path / "cgroup", tmp_path / "fs"
    groups.write_text(f"3:cpuset:/\n{line}\n")
    assert _limit(groups, root) is None
    (root / file).parent.mkdir(parents=True)
    (root / file).write_text("4096\n")
    (root / file).with_name("memory.max.other").write_text("1")
    assert _limit(groups, root) == 4096
