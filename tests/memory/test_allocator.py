import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, resource, sys
from hpcgen.memory.allocator import keep_freed_memory
if sys.argv[1] == "keep" and not keep_freed_memory():
    sys.exit(3)
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
def touch():
    block = libc.malloc(24 << 20)
    ctypes.memset(block, 1, 24 << 20)
    libc.free(block)
touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    touch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_memory_that_comes_and_goes_is_faulted_in_once():
    process = subprocess.run([sys.executable, "-c", PROGRAM, "keep"], capture_output=True, text=True, check=False)
    if process.returncode == 3:
        pytest.skip("no glibc")
    assert int(process.stdout) < 3000  # 30,000 without
