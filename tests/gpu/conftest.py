"""Tests that need a CUDA device; elsewhere they are skipped. `make test-gpu` runs them."""

import pytest
import torch


@pytest.fixture(autouse=True)
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    return torch.device("cuda")
