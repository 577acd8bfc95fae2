import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

from hpcgen.cluster.janitor import Janitor, mapped_shared_files

KILLED = """
import os, signal, sys
from pathlib import Path
from hpcgen.cluster.janitor import Janitor
janitor = Janitor()
janitor.remove_at_end([Path(sys.argv[1])])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_files_of_a_killed_process_are_removed_and_no_others(tmp_path: Path) -> None:
    named, other = tmp_path / "with a space; $(touch x)", tmp_path / "other"
    named.touch()
    other.touch()
    assert subprocess.run([sys.executable, "-c", KILLED, str(named)]).returncode == -9
    for _ in range(200):
        if not named.exists():
            break
        time.sleep(0.05)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_files_are_removed_when_the_janitor_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    janitor = Janitor()
    janitor.remove_at_end([path, tmp_path / "never was"])
    assert path.exists()
    janitor.close()
    assert not path.exists()


def test_a_mapped_file_is_found_under_the_name_that_it_has_now(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_bytes(b"x" * 4096)
    (tmp_path / "not mapped").write_bytes(b"x")
    file = os.open(first, os.O_RDWR)
    memory = mmap.mmap(file, 4096)
    os.link(first, second)
    first.unlink()
    assert mapped_shared_files(tmp_path) == [second]
    memory.close()
    os.close(file)
