import resource
from pathlib import Path

import pytest

from hpcgen.jobs.doctor.check import Level
from hpcgen.jobs.doctor.gpu import gpu_libraries
from hpcgen.jobs.doctor.machine import huge_pages, memlock, shared_huge_pages, shared_memory


@pytest.mark.parametrize(
    ("limit", "cuda", "level"),
    [(resource.RLIM_INFINITY, True, Level.OK), (65536, True, Level.WARNING), (65536, False, Level.OK)],
)
def test_a_memlock_limit_matters_where_there_is_a_gpu(limit: int, cuda: bool, level: Level) -> None:
    assert memlock(limit, cuda).level is level


def test_a_machine_without_shared_memory_cannot_run_several_ranks(tmp_path: Path) -> None:
    assert shared_memory(tmp_path / "shm").level is Level.ERROR


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("always [madvise] never", Level.OK),
        ("[always] madvise never", Level.OK),
        ("always madvise [never]", Level.WARNING),
    ],
)
def test_huge_pages_that_are_switched_off_are_a_warning(tmp_path: Path, text: str, level: Level) -> None:
    (tmp_path / "enabled").write_text(text)
    assert huge_pages(tmp_path).level is level


def test_a_kernel_without_huge_pages_is_none_of_our_business(tmp_path: Path) -> None:
    assert huge_pages(tmp_path).level is Level.SKIPPED


def test_libraries_of_gpus_are_asked_for_where_there_is_one() -> None:
    assert {check.level for check in gpu_libraries(present=False)} == {Level.SKIPPED}
    assert all(check.level in (Level.OK, Level.WARNING, Level.ERROR) for check in gpu_libraries(present=True))


@pytest.mark.parametrize(("chosen", "level"), [("advise", Level.OK), ("never", Level.WARNING)])
def test_shared_memory_has_a_setting_of_its_own(tmp_path: Path, chosen: str, level: Level) -> None:
    (tmp_path / "shmem_enabled").write_text(f"always within_size [{chosen}] deny force")
    assert shared_huge_pages(tmp_path).level is level
