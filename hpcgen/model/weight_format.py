"""The format of the weight file: a safetensors file, read in place.

Why safetensors: every tool of the field reads it, and its restrictions (one JSON header, then tensors without holes)
are just what a memory-mapped file in streaming order needs. It costs no speed, because what makes a weight file fast is
where the bytes lie, and the format leaves that to the writer:

- order: tensors follow the order in which a forward pass reads them, so that a decoder layer is one byte range;
- alignment: each tensor starts on a page (4 KiB). safetensors allows no holes, so the gaps are `__pad__` tensors of
  zero bytes, and the header is filled with spaces until the data starts on a page too;
- everything else (layouts, checksums, the model's configuration) is one JSON string in the header's `__metadata__`.

Opening one is a single `mmap` and parsing of the header (1.5 ms); a tensor is a view (see `weight_file`). Copying a
layer of 207 MB out of the mapped file took as long as out of anonymous memory (19 GB/s, one core of a Zen 5). The
header is written last, so a file without one is never taken for a whole one.
"""

import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Final

import torch

from hpcgen.errors import HpcgenError

ALIGNMENT: Final = 4096
"""Bytes. Page size of every machine this runs on; also what cudaHostRegister and O_DIRECT ask for."""
VERSION: Final = 1
METADATA_KEY: Final = "hpcgen"
PAD_PREFIX: Final = "__pad__."
LARGEST_HEADER: Final = 100_000_000
"""Bytes; the limit of the safetensors library itself."""
_UNSET_CRC = "00000000"
_PACKED_SHAPE_SLACK = 64  # bytes that the shape of a packed tensor may take more than was reserved for it

DTYPE_NAMES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES: Final = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class WeightFileError(HpcgenError):
    """A file that is not a weight file, or not a whole one."""


def align(offset: int) -> int:
    """The first multiple of ALIGNMENT that is not below `offset`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Entry:
    """One tensor of the safetensors file: bytes [start, stop) counted from the start of the file."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int = 0
    crc32: int = 0

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def stop(self) -> int:
        return self.start + self.bytes


@dataclass(frozen=True)
class Record:
    """One weight of the model: its data, and the scales of a quantised one."""

    name: str
    """Name in the transformers model's state dict."""
    unit: str
    """What is bound at once: 'embedding', 'layer.N', 'final_norm' or 'head'."""
    shape: tuple[int, ...]
    """Logical shape, that of the transformers parameter."""
    data: Entry
    layout: str = "plain"
    scale: Entry | None = None
    block: tuple[int, int] | None = None

    @property
    def entries(self) -> tuple[Entry, ...]:
        return (self.data,) if self.scale is None else (self.data, self.scale)

    @property
    def start(self) -> int:
        return self.data.start

    @property
    def stop(self) -> int:
        return self.entries[-1].stop


@dataclass(frozen=True)
class Header:
    """All that a weight file says about itself."""

    records: tuple[Record, ...]
    """In file order."""
    aliases: dict[str, str]
    """Tied weights: name -> the name that its bytes are stored under."""
    source: str
    """Fingerprint of the checkpoint that it was made from."""
    model_config: dict[str, Any]
    """config.json of the model."""
    dtype: str
    """Target dtype of the conversion, such as 'bfloat16'."""
    layout: str
    """The layout that was asked for: 'plain', or the name of a set of packings."""

    @property
    def data_start(self) -> int:
        return self.records[0].start if self.records else 0

    @property
    def file_size(self) -> int:
        return align(self.records[-1].stop) if self.records else 0


def place(header: Header) -> Header:
    """The same header with every entry at its offset: after the header, in order, each on a page."""
    placed = _place_from(header, ALIGNMENT)
    # Offsets in the header count from the start of the data, so its length does not depend on where that is.
    slack = _PACKED_SHAPE_SLACK * sum(record.layout != "plain" for record in header.records)
    return _place_from(placed, align(8 + len(_document(placed)) + slack))


def _place_from(header: Header, start: int) -> Header:
    records, offset = [], start
    for record in header.records:
        data = replace(record.data, start=offset)
        offset = align(data.stop)
        scale = None
        if record.scale is not None:
            scale = replace(record.scale, start=offset)
            offset = align(scale.stop)
        records.append(replace(record, data=data, scale=scale))
    return replace(header, records=tuple(records))


def encode(header: Header) -> bytes:
    """The file's first `header.data_start` bytes. Offsets must have been given by `place`."""
    document = _document(header)
    document = document.replace(_UNSET_CRC.encode(), f"{zlib.crc32(document):08x}".encode(), 1)
    length = header.data_start - 8
    if len(document) > length:
        raise ValueError(f"header of {len(document)} bytes does not fit the {length} reserved for it")
    return length.to_bytes(8, "little") + document.ljust(length, b" ")


def _document(header: Header) -> bytes:
    """The header as JSON, its own checksum unset. The checksum comes first in it, so `encode` can find it."""
    origin = header.data_start
    tensors: dict[str, Any] = {}
    weights: dict[str, Any] = {}
    checksums = {}
    for record in header.records:
        for entry in record.entries:
            checksums[entry.key] = f"{entry.crc32:08x}"
            tensors[entry.key] = {
                "dtype": DTYPE_NAMES[entry.dtype],
                "shape": entry.shape,
                "data_offsets": [entry.start - origin, entry.stop - origin],
            }
            if padding := align(entry.stop) - entry.stop:
                span = [entry.stop - origin, entry.stop + padding - origin]
                pad_key = f"{PAD_PREFIX}{len(checksums)}"
                tensors[pad_key] = {"dtype": "U8", "shape": [padding], "data_offsets": span}
        weights[record.name] = {
            "unit": record.unit,
            "shape": record.shape,
            "layout": record.layout,
            "data": record.data.key,
            "scale": record.scale.key if record.scale else None,
            "block": record.block,
        }
    about = {
        "version": VERSION,
        "source": header.source,
        "dtype": header.dtype,
        "layout": header.layout,
        "aliases": header.aliases,
        "weights": weights,
        "crc32": checksums,
        "model_config": header.model_config,
    }
    # "format": "pt" is what transformers asks of a safetensors file that it loads.
    metadata = {"header_crc32": _UNSET_CRC, "format": "pt", METADATA_KEY: json.dumps(about, separators=(",", ":"))}
    return json.dumps({"__metadata__": metadata, **tensors}, separators=(",", ":")).encode()


def decode(path: Path, head: bytes, file_size: int) -> Header:
    """Parses the first bytes of a weight file.

    Args:
        head: the file from its start, at least up to the end of the header.
        file_size: bytes.

    Raises:
        WeightFileError: not a weight file, one of another version, or one that is damaged or cut off.
    """
    about, tensors, origin = _parse(path, head)
    if about.get("version") != VERSION:
        raise WeightFileError(
            f"{path} has format version {about.get('version')}, this hpcgen reads version {VERSION}. "
            "Delete it and convert the model again with `hpcgen convert`."
        )

    def entry(key: str) -> Entry:
        described = tensors[key]
        start, stop = described["data_offsets"]
        dtype, shape = DTYPES[described["dtype"]], tuple(described["shape"])
        found = Entry(key, dtype, shape, origin + start, int(about["crc32"][key], 16))
        if found.stop != origin + stop:
            raise ValueError(f"{key} has {stop - start} bytes")
        return found

    try:
        records = tuple(
            Record(
                name,
                weight["unit"],
                tuple(weight["shape"]),
                entry(weight["data"]),
                weight["layout"],
                entry(weight["scale"]) if weight["scale"] else None,
                tuple(weight["block"]) if weight["block"] else None,
            )
            for name, weight in about["weights"].items()
        )
        header = Header(
            records, about["aliases"], about["source"], about["model_config"], about["dtype"], about["layout"]
        )
    except (KeyError, TypeError, ValueError) as problem:
        raise _damaged(path, f"its header contradicts itself ({problem})") from problem
    if origin % ALIGNMENT:
        raise _damaged(path, "its data does not start on a page")
    if file_size != header.file_size:
        missing = "cut off" if file_size < header.file_size else "longer than it should be"
        raise _damaged(path, f"it is {missing}: {file_size} bytes, of {header.file_size}")
    return header


def _parse(path: Path, head: bytes) -> tuple[dict, dict, int]:
    """(what hpcgen says about the file, safetensors entries, offset of the data)."""
    length = int.from_bytes(head[:8], "little")
    if len(head) < 8 or not 2 <= length <= LARGEST_HEADER or head[8:9] != b"{":
        raise WeightFileError(f"{path} is not a weight file. Make one with `hpcgen convert MODEL_DIRECTORY {path}`.")
    if len(head) < 8 + length:
        raise _damaged(path, f"it is cut off within its header: {len(head)} bytes, of at least {8 + length}")
    document = head[8 : 8 + length].rstrip(b" ")
    try:
        tensors = json.loads(document)
        metadata = tensors.pop("__metadata__", {})
    except (ValueError, AttributeError) as problem:
        raise _damaged(path, f"its header is not valid JSON ({problem})") from problem
    if METADATA_KEY not in metadata:
        raise WeightFileError(
            f"{path} is a safetensors file, but not a weight file of hpcgen. "
            "Convert the directory that it is in with `hpcgen convert`."
        )
    stated = metadata.get("header_crc32", "")
    if f"{zlib.crc32(document.replace(stated.encode(), _UNSET_CRC.encode(), 1)):08x}" != stated:
        raise _damaged(path, "the checksum of its header is wrong")
    return json.loads(metadata[METADATA_KEY]), tensors, 8 + length


def _damaged(path: Path, reason: str) -> WeightFileError:
    return WeightFileError(f"{path} is damaged: {reason}. Delete it and convert the model again with `hpcgen convert`.")


def gaps(header: Header) -> Iterable[tuple[int, int]]:
    """Byte ranges of the file between entries, which hold zeros."""
    entries = [entry for record in header.records for entry in record.entries]
    return [(entry.stop, align(entry.stop)) for entry in entries if entry.stop % ALIGNMENT]
