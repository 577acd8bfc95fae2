"""Whether the process that left a file still runs."""

import subprocess
import time
from pathlib import Path

from hpcgen.model.process_identity import describe, is_dead, own_identity


def test_a_process_is_alive_until_it_ends_and_unknown_elsewhere() -> None:
    assert is_dead(own_identity()) is False
    assert is_dead("another-node~1~2~3") is None
    assert is_dead("nonsense") is None
    child = subprocess.Popen(["sleep", "60"])
    host, namespace, _, _ = own_identity().split("~")
    started = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
    identity = f"{host}~{namespace}~{child.pid}~{started}"
    assert is_dead(identity) is False
    child.kill()
    while Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    assert is_dead(identity) is True  # a zombie writes no more
    child.wait()
    assert is_dead(identity) is True
    assert describe(identity) == f"process {child.pid} on {host}"
