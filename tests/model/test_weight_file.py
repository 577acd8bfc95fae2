"""The weight file: where bytes lie, how they are viewed in place and in copies, and what damage does."""

import random
import struct
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hpcgen.kernels.dequantize import dequantize
from hpcgen.model.conversion import convert
from hpcgen.model.weight_file import WeightFile
from hpcgen.model.weight_format import ALIGNMENT, PAD_PREFIX, WeightFileError, gaps
from hpcgen.model.weight_verify import verify

from .checkpoints import save_fp8
from .tiny_models import save_tiny


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> WeightFile:
    """An fp8 file: it has everything that a file can have but MXFP4."""
    directory = tmp_path_factory.mktemp("fp8")
    save_fp8("deepseek_v3", directory / "model", (16, 16))
    return WeightFile(convert(directory / "model", directory / "weights"))


@pytest.fixture
def copy(whole: WeightFile, tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(whole.path.read_bytes())
    return path


def test_every_tensor_starts_on_a_page_in_the_file_and_in_memory(whole: WeightFile) -> None:
    for name in whole.names:
        stored = whole.get(name)
        assert whole.record(name).start % ALIGNMENT == 0
        assert stored.data.data_ptr() % ALIGNMENT == 0
        assert stored.scale is None or stored.scale.data_ptr() % ALIGNMENT == 0


def test_the_safetensors_library_reads_the_same_tensors(whole: WeightFile) -> None:
    tensors = {key: t for key, t in load_file(whole.path).items() if not key.startswith(PAD_PREFIX)}
    for name in whole.names:
        stored = whole.get(name)
        found = tensors.pop(name)
        assert found.dtype == stored.data.dtype
        assert torch.equal(found.reshape(-1).view(torch.uint8), whole.raw(name))
        if stored.scale is not None:
            assert torch.equal(tensors.pop(f"{name}_scale_inv"), stored.scale)
    assert tensors == {}


def test_two_ranks_see_the_same_memory(whole: WeightFile) -> None:
    def shared_file_pages(file: WeightFile) -> str:
        address = file.bytes(0, 1).data_ptr()
        line = next(li for li in Path("/proc/self/maps").read_text().splitlines() if li.startswith(f"{address:x}-"))
        return line.split()[1]

    assert shared_file_pages(whole) == "r--s"


def test_a_unit_copied_at_once_and_viewed_in_the_copy_is_the_unit(whole: WeightFile) -> None:
    for unit in whole.units:
        start, stop = whole.unit_range(unit)
        assert start % ALIGNMENT == stop % ALIGNMENT == 0
        buffer = torch.empty(stop - start + 100, dtype=torch.uint8)
        buffer[: stop - start] = whole.bytes(start, stop)
        views = whole.unit_views(unit, buffer)
        assert tuple(views) == whole.unit_names(unit)
        for name, view in views.items():
            stored = whole.get(name)
            inside = view.data.data_ptr() - buffer.data_ptr()
            assert 0 <= inside < len(buffer)
            assert (view.shape, view.layout, view.block) == (stored.shape, stored.layout, stored.block)
            assert torch.equal(dequantize(view, torch.float32), dequantize(stored, torch.float32))


def test_units_cover_the_file_without_overlap(whole: WeightFile) -> None:
    ranges = [whole.unit_range(unit) for unit in whole.units]
    assert ranges[0][0] == whole.header.data_start
    assert all(before[1] == after[0] for before, after in pairwise(ranges))
    assert ranges[-1][1] == whole.path.stat().st_size


def test_a_stage_of_a_layer_is_a_byte_range_too(whole: WeightFile) -> None:
    layer = whole.unit_names("layer.1")
    attention = [name for name in layer if ".self_attn." in name]
    experts = [name for name in layer if ".mlp." in name]
    assert whole.range(attention)[1] == whole.range(experts)[0]


def test_a_range_that_would_hold_a_stranger_is_refused(whole: WeightFile) -> None:
    first, stranger, last = whole.names[3:6]
    with pytest.raises(ValueError, match=f"{stranger} lies between {first} and {last}"):
        whole.range([last, first])
    with pytest.raises(ValueError, match="no names"):
        whole.range([])


def test_unknown_names_and_units_are_key_errors(whole: WeightFile) -> None:
    with pytest.raises(KeyError):
        whole.get("model.layers.99.mlp.up_proj.weight")
    with pytest.raises(KeyError):
        whole.unit_range("layer.99")


def test_prefetch_and_populate_take_any_range(whole: WeightFile) -> None:
    for unit in whole.units:
        whole.prefetch(whole.unit_names(unit))
        whole.populate(whole.unit_names(unit))


def test_populate_reads_by_hand_where_the_kernel_cannot(whole: WeightFile, monkeypatch) -> None:
    monkeypatch.setattr("hpcgen.model.weight_file._MADV_POPULATE_READ", 12345)
    whole.populate(whole.names)


def test_the_file_says_what_it_was_made_from(whole: WeightFile) -> None:
    assert whole.model_config["model_type"] == "deepseek_v3"
    assert len(whole.source) == 64
    assert whole.header.dtype == "bfloat16"


def test_a_whole_file_has_no_problems(whole: WeightFile) -> None:
    reports: list[tuple[int, int]] = []
    assert verify(whole.path, progress=lambda *report: reports.append(report)) == []
    assert reports[-1][0] == reports[-1][1]


def test_a_flipped_bit_is_found_wherever_it_is(whole: WeightFile, copy: Path) -> None:
    size, start = copy.stat().st_size, whole.header.data_start
    chance = random.Random(1)
    spaces = range(start - 20, start)  # fill the header up
    padding = [*(begin for begin, _ in gaps(whole.header)), size - 1]
    anywhere = [chance.randrange(size) for _ in range(60)] + [chance.randrange(start) for _ in range(60)]
    for position in [*range(12), *spaces, *padding, *anywhere]:
        with copy.open("r+b") as file:
            file.seek(position)
            byte = file.read(1)[0]
            file.seek(position)
            file.write(bytes([byte ^ 1 << chance.randrange(8)]))
            file.flush()
            assert verify(copy), f"the change of byte {position} was not found"
            file.seek(position)
            file.write(bytes([byte]))
    assert verify(copy) == []


def test_the_damaged_tensor_is_named(whole: WeightFile, copy: Path) -> None:
    name = "model.layers.2.mlp.experts.down_proj"
    with copy.open("r+b") as file:
        file.seek(whole.record(name).start + 5)
        file.write(bytes([file.read(1)[0] ^ 255]))
    (problem,) = verify(copy)
    assert problem.startswith(f"{name} is damaged")


@pytest.mark.parametrize("kept", [0, 3, 8, 9, 100, 5000, -4096, -1])
def test_a_cut_off_file_is_refused_at_opening(kept: int, copy: Path) -> None:
    copy.write_bytes(copy.read_bytes()[:kept])
    with pytest.raises(WeightFileError, match=r"is not a weight file|is damaged: it is cut off"):
        WeightFile(copy)
    assert len(verify(copy)) == 1


def test_a_file_with_something_after_its_end_is_refused(copy: Path) -> None:
    with copy.open("ab") as file:
        file.write(b"more")
    with pytest.raises(WeightFileError, match="longer than it should be"):
        WeightFile(copy)


def test_foreign_files_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(WeightFileError, match="No such file"):
        WeightFile(path)
    path.write_text("a text that is long enough to hold a header, but does not")
    with pytest.raises(WeightFileError, match=r"is not a weight file\. Make one with `hpcgen convert"):
        WeightFile(path)
    save_file({"x": torch.ones(3)}, path)
    with pytest.raises(WeightFileError, match="is a safetensors file, but not a weight file"):
        WeightFile(path)
    path.write_bytes(struct.pack("<Q", 10) + b'{"a": nope')
    with pytest.raises(WeightFileError, match="not valid JSON"):
        WeightFile(path)


def test_a_file_of_another_format_version_says_so(tmp_path: Path, monkeypatch) -> None:
    save_tiny("llama", tmp_path / "model", torch.bfloat16)
    with monkeypatch.context() as patch:
        patch.setattr("hpcgen.model.weight_format.VERSION", 99)
        path = convert(tmp_path / "model", tmp_path / "weights")
    with pytest.raises(WeightFileError, match="format version 99, this hpcgen reads version 1"):
        WeightFile(path)
