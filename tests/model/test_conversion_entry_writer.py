"""A tensor of the weight file is written in parts, counted and checksummed."""

import os
import zlib
from pathlib import Path

import pytest
import torch

from hpcgen.model.conversion.entry_writer import EntryWriter
from hpcgen.model.weight_format import Entry, WeightFileError


def test_parts_follow_each_other_at_the_entrys_place(tmp_path: Path) -> None:
    tensor = torch.randn(6, 5, dtype=torch.float64)
    with (tmp_path / "file").open("w+b") as file:
        writer = EntryWriter(file.fileno(), Entry("x", torch.float64, (6, 5), start=100))
        writer.write(tensor[:2])
        writer.write(tensor[2:].mT.contiguous().mT)
        entry = writer.finish()
        content = file.read()
    assert content == bytes(100) + tensor.numpy().tobytes()
    assert entry.crc32 == zlib.crc32(tensor.numpy().tobytes())


def test_too_much_and_too_little_are_errors(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+b") as file:
        writer = EntryWriter(file.fileno(), Entry("x", torch.int8, (4,)))
        writer.write(torch.zeros(3, dtype=torch.int8))
        with pytest.raises(ValueError, match="3 bytes of x, not 4"):
            writer.finish()
        with pytest.raises(ValueError, match="more than the 4 bytes of x"):
            writer.write(torch.zeros(2, dtype=torch.int8))


def test_a_disk_that_fills_up_names_the_remedy() -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(WeightFileError, match=r"No space left while writing .* set HPCGEN_CACHE"):
            EntryWriter(descriptor, Entry("x", torch.int8, (4,))).write(torch.zeros(4, dtype=torch.int8))
    finally:
        os.close(descriptor)
