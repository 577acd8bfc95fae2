"""How the device's memory is divided in each phase: resident parameters, ring buffer, KV, room to compute.

A division that works, for a given budget; the planner may want another, which is kept to what fits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hpcgen.kernels.attention.kv_layout import KVLayout
from hpcgen.memory.budget import OutOfDeviceMemory

RING_SLOTS = 2
"""One unit computes while the next one is copied (paper §5.1)."""


@dataclass(frozen=True, slots=True)
class DecodeMemory:
    """What a plan wants of the division in decode."""

    ring_slots: int = RING_SLOTS
    kv_bytes: int | None = None
    """KV pages on the device; None: by a simple rule."""
    kv_streamed: bool = False
    """KV streamed by layer, whatever else fits."""


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


def divide_for_prefill(budget: int, needs: DeviceNeeds, ring_slots: int = RING_SLOTS) -> PhaseMemory:
    """Prefill holds two layers' KV of a microbatch; what is left holds parameters. Raises OutOfDeviceMemory."""
    pages = max(needs.sequence_pages, needs.microbatch_pages)
    kv_bytes = 2 * needs.layout.layer_bytes * pages
    left = budget - needs.prefill_activations - kv_bytes
    resident, slots = _parameters(left, needs, ring_slots, "prefill", kv_bytes, needs.prefill_activations)
    return PhaseMemory(resident, slots, "layers", kv_bytes, needs.prefill_activations)


def divide_for_decode(budget: int, needs: DeviceNeeds, wanted: DecodeMemory | None = None) -> PhaseMemory:
    """Decode wants KV in pages. Parameters are streamed where both do not fit, and KV too where even the longest
    sequence does not; or as `wanted`, as far as that fits. Raises OutOfDeviceMemory."""
    wanted = wanted or DecodeMemory()
    left = budget - needs.decode_activations
    page_bytes = needs.layout.page_bytes
    longest, most = needs.sequence_pages * page_bytes, needs.active_pages * page_bytes
    most = max(most, longest)
    total, ring = sum(needs.unit_bytes.values()), _ring_bytes(needs, wanted.ring_slots)
    if left - min(total, ring) < longest or wanted.kv_streamed:
        kv_bytes = 2 * needs.layout.layer_bytes * needs.sequence_pages
        kind: Literal["layers", "pages"] = "layers"
    else:
        kind = "pages"
        if wanted.kv_bytes is not None:
            kv_bytes = min(wanted.kv_bytes, left - min(total, ring))
        elif left - total >= longest:
            kv_bytes = left - total
        else:  # Both are scarce: KV gets half of what the ring leaves: it sets the batch that a streamed layer serves.
            kv_bytes = (left - ring) // 2
        kv_bytes = min(max(kv_bytes, longest), most) // page_bytes * page_bytes
    rest = left - kv_bytes
    resident, slots = _parameters(rest, needs, wanted.ring_slots, "decode", kv_bytes, needs.decode_activations)
    return PhaseMemory(resident, slots, kind, kv_bytes, needs.decode_activations)


def _ring_bytes(needs: DeviceNeeds, slots: int) -> int:
    """Least bytes that parameters need: the ring, and the units that are larger than its slots."""
    return min(
        sum(size for unit, size in needs.unit_bytes.items() if unit not in streamable) + slots * slot_bytes
        for streamable, slot_bytes in _streamable(needs)
    )


def _streamable(needs: DeviceNeeds) -> list[tuple[list[str], int]]:
    """What can be streamed through slots of each size that makes a difference: (units in model order, slot bytes)."""
    sizes = {unit: size for unit, size in needs.unit_bytes.items() if unit not in needs.always_resident}
    return [([unit for unit, own in sizes.items() if own <= size], size) for size in sorted(set(sizes.values()))]


def _parameters(
    left: int, needs: DeviceNeeds, slots: int, phase: str, kv_bytes: int, activation_bytes: int
) -> tuple[tuple[str, ...], int]:
    """(resident units, ring slots) within `left` bytes, with the fewest bytes to copy in a sweep.

    Streamed units are spread evenly over the sweep, so that the copy of each hides behind the resident ones before it.
    """
    sizes = needs.unit_bytes
    total = sum(sizes.values())
    if total <= left:
        return tuple(sizes), 0
    best: tuple[int, set[str]] | None = None
    for streamable, slot_bytes in _streamable(needs):
        for count in range(1, len(streamable) + 1):
            step = len(streamable) / count
            streamed = {streamable[int(index * step)] for index in range(count)}
            copied = sum(sizes[unit] for unit in streamed)
            if total - copied + slots * slot_bytes <= left:
                if best is None or copied < best[0]:
                    best = copied, streamed
                break
    if best is None:
        ring = _ring_bytes(needs, slots)
        least = ring + kv_bytes + activation_bytes
        raise OutOfDeviceMemory(
            f"The device budget is too small: {phase} needs at least {least / 2**20:,.1f} MiB, of these "
            f"{ring / 2**20:,.1f} for a ring buffer of parameters, {kv_bytes / 2**20:,.1f} for KV and "
            f"{activation_bytes / 2**20:,.1f} to compute. Raise --device-memory, or lower --attention-microbatch, "
            "--expert-batch or --max-model-len."
        )
    return tuple(unit for unit in sizes if unit not in best[1]), slots
