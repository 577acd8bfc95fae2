import pytest
import torch

from hpcgen.memory.budget import DeviceBudget, OutOfDeviceMemory

CPU = torch.device("cpu")


def test_what_does_not_fit_is_refused_with_a_table_of_what_is_in_use() -> None:
    budget = DeviceBudget(100 * 2**20, CPU)
    budget.reserve("KV", 70 * 2**20)
    with pytest.raises(OutOfDeviceMemory, match=r"ring buffer needs 31\.0 MiB.*KV 70\.0 MiB.*--device-memory"):
        budget.reserve("ring buffer", 31 * 2**20)
    assert budget.used == 70 * 2**20


def test_released_memory_can_be_reserved_again_and_the_peak_is_remembered() -> None:
    budget = DeviceBudget(10, CPU)
    budget.reserve("a", 6)
    budget.reserve("a", 3)
    budget.release("a")
    assert budget.buffer("b", 10).numel() == 10
    assert budget.by_purpose() == {"b": 10} and budget.peak == 10 and budget.free == 0


def test_without_a_limit_it_only_counts() -> None:
    budget = DeviceBudget(None, CPU)
    budget.reserve("a", 10**15)
    assert budget.used == 10**15 and budget.free is None
