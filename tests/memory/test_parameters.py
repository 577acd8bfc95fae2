"""Streamed parameters against a source whose bytes say which unit they are of."""

import random
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcgen.kernels.layouts import StoredTensor
from hpcgen.memory.budget import DeviceBudget
from hpcgen.memory.parameters import InPlaceParameters, ResidentUnits, StreamedParameters
from hpcgen.memory.streams import ThreadCopyStream

CPU = torch.device("cpu")


class Source:
    """Units of different sizes, each filled with its number."""

    def __init__(self, count: int):
        self.units = [f"layer.{i}" for i in range(count)]
        sizes = [64 + 16 * (i % 3) for i in range(count)]
        self.starts = [sum(sizes[:i]) for i in range(count)] + [sum(sizes)]
        self.data = torch.cat([torch.full((size,), i, dtype=torch.uint8) for i, size in enumerate(sizes)])

    def unit_range(self, unit: str) -> tuple[int, int]:
        index = self.units.index(unit)
        return self.starts[index], self.starts[index + 1]

    def unit_bytes(self, unit: str) -> int:
        start, stop = self.unit_range(unit)
        return stop - start

    def unit_pieces(self, unit: str) -> list[torch.Tensor]:
        return [self.data[slice(*self.unit_range(unit))]]

    def unit_views(self, unit: str, buffer: torch.Tensor) -> dict[str, StoredTensor]:
        start, stop = self.unit_range(unit)
        view = buffer[: stop - start]
        return {"weight": StoredTensor(view, tuple(view.shape))}


class Model:
    """Notes what each unit is bound to."""

    def __init__(self) -> None:
        self.bound: dict[str, torch.Tensor] = {}

    def prepare(self, unit: str, tensors: dict[str, StoredTensor]):
        class Bound:
            def apply(_self) -> None:
                self.bound[unit] = tensors["weight"].data

        return Bound()

    def unbind(self, unit: str) -> None:
        self.bound.pop(unit)

    def runs_right(self, unit: str, source: Source) -> bool:
        return bool(self.bound[unit].eq(source.units.index(unit)).all())


def streamed(source: Source, model: Model, resident: list[str], slots: int) -> tuple[StreamedParameters, DeviceBudget]:
    budget, stream = DeviceBudget(None, CPU), ThreadCopyStream()
    units = ResidentUnits(budget, stream)
    units.load(source, model, resident)
    return StreamedParameters(source, model, source.units, units, slots, budget, stream), budget


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 7),
    slots=st.integers(1, 4),
    resident=st.sets(st.integers(0, 6)),
    order=st.lists(st.integers(0, 6), max_size=30),
)
def test_a_required_unit_has_its_own_bytes_in_any_order(
    count: int, slots: int, resident: set[int], order: list[int]
) -> None:
    source, model = Source(count), Model()
    parameters, _ = streamed(source, model, [source.units[i] for i in resident if i < count], slots)
    for index in order:
        unit = source.units[index % count]
        parameters.require(unit)
        assert model.runs_right(unit, source)


@pytest.mark.parametrize("slots", [2, 3])
def test_a_sweep_copies_every_streamed_unit_once_and_the_next_one_is_under_way_before_it_is_required(
    slots: int,
) -> None:
    source, model = Source(6), Model()
    parameters, _ = streamed(source, model, ["layer.0"], slots)
    for _ in range(3):
        for unit in source.units:
            for _ in range(3):  # attention, experts, several microbatches
                parameters.require(unit)
                assert model.runs_right(unit, source)
    per_sweep = source.starts[6] - source.starts[1]
    ahead = source.starts[slots] - source.starts[1]
    assert parameters.copied_bytes == 3 * per_sweep + ahead


def test_the_ring_and_the_resident_units_are_all_the_memory_that_is_used() -> None:
    source, model = Source(6), Model()
    _, budget = streamed(source, model, ["layer.0", "layer.5"], 2)
    largest = max(stop - start for start, stop in map(source.unit_range, source.units[1:5]))
    sizes = sum(stop - start for start, stop in map(source.unit_range, ["layer.0", "layer.5"]))
    assert budget.used == sizes + 2 * largest


def test_units_that_stay_resident_are_not_copied_again_and_those_that_go_are_unbound() -> None:
    source, model = Source(4), Model()
    budget = DeviceBudget(None, CPU)
    units = ResidentUnits(budget, ThreadCopyStream())
    units.load(source, model, source.units)
    kept = model.bound["layer.2"].data_ptr()
    units.release_except(source, ["layer.2", "layer.3"])
    assert set(model.bound) == {"layer.2", "layer.3"} and set(budget.by_purpose()) == {
        "resident layer.2",
        "resident layer.3",
    }
    units.load(source, model, ["layer.1", "layer.2"])
    assert model.bound["layer.2"].data_ptr() == kept and model.runs_right("layer.1", source)


def test_in_place_nothing_is_copied() -> None:
    source, model = Source(3), Model()
    InPlaceParameters(source, model, source.units).require("layer.1")
    assert all(
        model.bound[unit].data_ptr() == source.data[source.unit_range(unit)[0] :].data_ptr() for unit in source.units
    )


def test_a_unit_that_the_copy_overwrites_late_is_still_waited_for() -> None:
    class SlowStream(ThreadCopyStream):
        def copy(self, pairs):
            self._worker.submit(time.sleep, delays.random() * 0.002)
            return super().copy(pairs)

    delays = random.Random(0)
    source, model = Source(5), Model()
    budget, stream = DeviceBudget(None, CPU), SlowStream()
    units = ResidentUnits(budget, stream)
    parameters = StreamedParameters(source, model, source.units, units, 2, budget, stream)
    for _ in range(5):
        for unit in source.units:
            parameters.require(unit)
            assert model.runs_right(unit, source)
    stream.close()
