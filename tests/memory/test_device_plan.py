import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpcgen.kernels.attention.kv_layout import KVLayout
from hpcgen.memory.budget import OutOfDeviceMemory
from hpcgen.memory.device_plan import DeviceNeeds, PhaseMemory, divide_for_decode, divide_for_prefill

LAYOUT = KVLayout(4, 2, 16, 2, 16, torch.bfloat16)


def needs(layer: int = 1000, layers: int = 4, sequence_pages: int = 4, head: int = 500) -> DeviceNeeds:
    units = {"embedding": head, **{f"layer.{i}": layer for i in range(layers)}, "final_norm": 10, "head": head}
    return DeviceNeeds(units, ("final_norm",), LAYOUT, sequence_pages, 6, 100, 2000, 1500)


def used(memory: PhaseMemory, needs: DeviceNeeds) -> int:
    streamed = [size for unit, size in needs.unit_bytes.items() if unit not in memory.resident]
    resident = sum(needs.unit_bytes[unit] for unit in memory.resident)
    return resident + memory.ring_slots * max(streamed, default=0) + memory.kv_bytes + memory.activation_bytes


@given(st.integers(0, 5_000_000), st.integers(10, 200_000), st.integers(1, 20), st.integers(1, 200_000))
def test_no_division_passes_the_budget_and_each_can_run(budget: int, layer: int, pages: int, head: int) -> None:
    wants = needs(layer, sequence_pages=pages, head=head)
    for divide in (divide_for_prefill, divide_for_decode):
        try:
            memory = divide(budget, wants)
        except OutOfDeviceMemory as error:
            assert "--device-memory" in str(error)
            continue
        assert used(memory, wants) <= budget
        assert memory.ring_slots >= 2 or set(memory.resident) == set(wants.unit_bytes)
        unit = LAYOUT.page_bytes if memory.kv == "pages" else 2 * LAYOUT.layer_bytes
        assert memory.kv_bytes // unit >= pages


@given(st.integers(0, 3_000_000))
def test_a_larger_budget_never_stops_working(budget: int) -> None:
    wants = needs()
    for divide in (divide_for_prefill, divide_for_decode):
        try:
            divide(budget, wants)
        except OutOfDeviceMemory:
            continue
        divide(budget + 1000, wants)


def test_decode_keeps_all_parameters_resident_where_they_fit_beside_the_longest_sequence() -> None:
    wants = needs()
    memory = divide_for_decode(10_000_000, wants)
    assert memory.kv == "pages" and memory.ring_slots == 0 and memory.resident == tuple(wants.unit_bytes)
    assert memory.kv_bytes == 100 * LAYOUT.page_bytes


def test_decode_streams_parameters_before_it_streams_kv() -> None:
    wants = needs(layer=50_000)
    longest = wants.sequence_pages * LAYOUT.page_bytes
    memory = divide_for_decode(longest + 2 * 50_000 + 10 + 1500, wants)
    assert memory.kv == "pages" and memory.ring_slots == 2
    memory = divide_for_decode(longest + 2 * 50_000 + 10 + 1500 - 1, wants)
    assert memory.kv == "layers"


def test_too_small_a_budget_says_how_much_each_part_needs() -> None:
    with pytest.raises(OutOfDeviceMemory, match=r"prefill needs at least .* MiB.*ring buffer.*KV"):
        divide_for_prefill(1000, needs())
