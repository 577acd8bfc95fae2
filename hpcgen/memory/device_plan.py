"""How the device's memory is divided in each phase: resident parameters, ring buffer, KV, room to compute.

A division that works, for a given budget. The planner may choose a better one; it obeys the same bounds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hpcgen.kernels.attention.kv_layout import KVLayout
from hpcgen.memory.budget import OutOfDeviceMemory

RING_SLOTS = 2
"""One unit computes while the next one is copied (paper §5.1)."""


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """Division of the device's memory in one phase, in bytes."""

    resident: tuple[str, ...]
    """Units whose parameters stay on the device."""
    ring_slots: int
    kv: Literal["layers", "pages"]
    """KV streamed by layer, or whole pages on the device."""
    kv_bytes: int
    activation_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceNeeds:
    """What a model and its batch sizes ask of a device."""

    unit_bytes: Mapping[str, int]
    """Bytes of each unit, in model order."""
    always_resident: tuple[str, ...]
    """Units that are too small to stream."""
    layout: KVLayout
    sequence_pages: int
    """Pages of the longest sequence that may come."""
    microbatch_pages: int
    """Pages that a prefill microbatch touches where its sequences are short."""
    active_pages: int
    """Pages of all sequences that decode at once, at most."""
    prefill_activations: int
    decode_activations: int


def divide_for_prefill(budget: int, needs: DeviceNeeds) -> PhaseMemory:
    """Prefill holds two layers' KV of a microbatch; what is left holds parameters. Raises OutOfDeviceMemory."""
    pages = max(needs.sequence_pages, needs.microbatch_pages)
    kv_bytes = 2 * needs.layout.layer_bytes * pages
    left = budget - needs.prefill_activations - kv_bytes
    resident, slots, _ = _parameters(left, needs, "prefill", kv_bytes, needs.prefill_activations)
    return PhaseMemory(resident, slots, "layers", kv_bytes, needs.prefill_activations)


def divide_for_decode(budget: int, needs: DeviceNeeds) -> PhaseMemory:
    """Decode wants KV in pages. Parameters are streamed where both do not fit, and KV too where even the longest
    sequence does not. Raises OutOfDeviceMemory."""
    left = budget - needs.decode_activations
    page_bytes = needs.layout.page_bytes
    longest, most = needs.sequence_pages * page_bytes, needs.active_pages * page_bytes
    total = sum(needs.unit_bytes.values())
    ring = _ring_bytes(needs)
    if left - total >= longest:
        kv_bytes = min(left - total, max(most, longest)) // page_bytes * page_bytes
        return PhaseMemory(tuple(needs.unit_bytes), 0, "pages", kv_bytes, needs.decode_activations)
    if left - ring >= longest:
        # Both are scarce: KV gets half of what the ring leaves, for it sets the batch that a streamed layer serves.
        kv_bytes = min(max(longest, (left - ring) // 2), max(most, longest)) // page_bytes * page_bytes
        resident, slots, _ = _parameters(left - kv_bytes, needs, "decode", kv_bytes, needs.decode_activations)
        return PhaseMemory(resident, slots, "pages", kv_bytes, needs.decode_activations)
    kv_bytes = 2 * needs.layout.layer_bytes * needs.sequence_pages
    resident, slots, _ = _parameters(left - kv_bytes, needs, "decode", kv_bytes, needs.decode_activations)
    return PhaseMemory(resident, slots, "layers", kv_bytes, needs.decode_activations)


def _ring_bytes(needs: DeviceNeeds) -> int:
    """Least bytes that parameters need: the ring and what is always resident."""
    streamed = [size for unit, size in needs.unit_bytes.items() if unit not in needs.always_resident]
    fixed = sum(needs.unit_bytes[unit] for unit in needs.always_resident)
    return fixed + RING_SLOTS * max(streamed, default=0)


def _parameters(
    left: int, needs: DeviceNeeds, phase: str, kv_bytes: int, activation_bytes: int
) -> tuple[tuple[str, ...], int, int]:
    """(resident units, ring slots, bytes used) within `left` bytes."""
    total = sum(needs.unit_bytes.values())
    if total <= left:
        return tuple(needs.unit_bytes), 0, total
    used = _ring_bytes(needs)
    if used > left:
        least = used + kv_bytes + activation_bytes
        raise OutOfDeviceMemory(
            f"The device budget is too small: {phase} needs at least {least / 2**20:,.1f} MiB, of these "
            f"{used / 2**20:,.1f} for a ring buffer of parameters, {kv_bytes / 2**20:,.1f} for KV and "
            f"{activation_bytes / 2**20:,.1f} to compute. Raise --device-memory, or lower --attention-microbatch, "
            "--expert-batch or --max-model-len."
        )
    resident = list(needs.always_resident)
    # The last units first: they have the longest way to go before the sweep comes round to them again.
    for unit in reversed(list(needs.unit_bytes)):
        if unit not in resident and used + needs.unit_bytes[unit] <= left:
            resident.append(unit)
            used += needs.unit_bytes[unit]
    return tuple(unit for unit in needs.unit_bytes if unit in resident), RING_SLOTS, used
