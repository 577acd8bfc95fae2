import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpcgen.kernels.attention.kv_layout import KVLayout
from hpcgen.memory.budget import OutOfDeviceMemory
from hpcgen.memory.device_plan import DecodeMemory, DeviceNeeds, PhaseMemory, divide_for_decode, divide_for_prefill

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
    least = longest + 2 * 50_000 + 10 + 1500
    memory = divide_for_decode(least, wants)
    assert memory.kv == "pages" and memory.ring_slots == 2
    memory = divide_for_decode(least - 1, wants)
    assert memory.kv == "layers"


def test_units_larger_than_the_layers_stay_so_that_they_do_not_make_the_ring_larger() -> None:
    wants = needs(layer=1000, layers=8, head=3000)
    memory = divide_for_prefill(2000 + 12 * LAYOUT.layer_bytes + 2 * 3000 + 10 + 2 * 1000, wants)
    assert {"embedding", "head"} <= set(memory.resident) and memory.ring_slots == 2


def test_streamed_units_are_spread_over_the_sweep() -> None:
    wants = needs(layer=1000, layers=8, head=100)
    memory = divide_for_prefill(2000 + 12 * LAYOUT.layer_bytes + 200 + 10 + 6 * 1000, wants)
    streamed = [i for i in range(8) if f"layer.{i}" not in memory.resident]
    assert streamed == [1, 3, 5, 7]


@given(st.integers(0, 500_000), st.integers(2, 4), st.integers(0, 500_000), st.booleans())
def test_what_a_plan_wants_is_kept_to_what_fits(budget: int, slots: int, kv: int, streamed: bool) -> None:
    wants = needs(layer=20_000, sequence_pages=2)
    try:
        memory = divide_for_decode(budget, wants, DecodeMemory(slots, kv, streamed))
    except OutOfDeviceMemory:
        return
    assert used(memory, wants) <= budget
    if streamed:
        assert memory.kv == "layers"
    elif memory.kv == "pages":
        assert memory.kv_bytes <= max(kv, 2 * LAYOUT.page_bytes)


def test_too_small_a_budget_says_how_much_each_part_needs() -> None:
    with pytest.raises(OutOfDeviceMemory, match=r"prefill needs at least .* MiB.*ring buffer.*KV"):
        divide_for_prefill(1000, needs())
