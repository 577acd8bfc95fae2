"""Writes the weight file from a checkpoint, a few experts or one tensor at a time, without making the model."""

import os
import shutil
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from threading import Event, Lock

import torch

from hpcgen.kernels.layouts import PANELS, PANELS_TRANSPOSED, pack
from hpcgen.model.atomic_file import written_aside
from hpcgen.model.conversion.checkpoint import Checkpoint, source_fingerprint
from hpcgen.model.conversion.definition import Definition
from hpcgen.model.conversion.entry_writer import EntryWriter
from hpcgen.model.conversion.layout_choice import layout_choice
from hpcgen.model.conversion.pieces import Piece, pieces
from hpcgen.model.conversion.plan import ConversionError, Group, Plan, plan_conversion
from hpcgen.model.quantization import Quantization, quantization_of
from hpcgen.model.weight_format import Header, Record, WeightFileError, encode, place

Progress = Callable[[int, int, str], None]
"""(bytes written, bytes in all, name of the weight just written); called by one thread at a time."""


def convert(
    model_directory: str | os.PathLike,
    destination: str | os.PathLike,
    dtype: torch.dtype | None = None,
    layout: str = "plain",
    progress: Progress | None = None,
    threads: int | None = None,
) -> Path:
    """Converts a Hugging Face safetensors checkpoint to a weight file, and returns its path.

    Memory is bounded by the largest tensor of the checkpoint, or `CHUNK_BYTES` of experts, for each thread. The
    destination appears only when it is whole and on the disk.

    Args:
        dtype: of the weights that are not quantised; None takes config.json's, and bfloat16 if it names none. What
            transformers keeps in fp32 (router gates of DeepSeek, norms of GPT-OSS in fp16) stays so.
        layout: of the weights that are not quantised: 'plain', as transformers has them, or 'packed', as the CPU
            kernels compute fastest with.
        threads: that read, convert and write; None takes 4, or the number of cores if that is less.

    Raises:
        ModelError: a wrong model directory, an unsupported architecture or quantisation.
        ConversionError: tensors that are missing, unknown, or of another shape than config.json says.
        WeightFileError: no space on the disk.
    """
    directory, destination = Path(model_directory), Path(destination)
    definition = Definition(directory, dtype)
    source = source_fingerprint(directory)
    checkpoint = Checkpoint(directory)
    quantization = quantization_of(checkpoint.config)
    plan = plan_conversion(checkpoint, definition, quantization, layout_choice(layout, definition))
    header = place(
        Header(
            tuple(plan.records),
            definition.aliases,
            source,
            checkpoint.config,
            str(definition.dtype).removeprefix("torch."),
            layout,
        )
    )
    _check_space(destination, header.file_size)
    with written_aside(destination) as descriptor:
        writers = _Writers(descriptor, header, progress)
        _run_groups(plan, checkpoint, definition, quantization, writers, threads or min(4, os.cpu_count() or 1))
        finished = writers.finish()
        os.truncate(descriptor, finished.file_size)
        os.pwrite(descriptor, encode(finished), 0)
    return destination


class _Writers:
    """The places of all weights in the file, filled by several threads."""

    def __init__(self, descriptor: int, header: Header, progress: Progress | None):
        self._header = header
        self._records = {record.name: record for record in header.records}
        self._progress = progress
        self._lock = Lock()
        self._done = 0
        self._total = sum(entry.bytes for record in header.records for entry in record.entries)
        self._packed_shapes: dict[str, tuple[int, ...]] = {}
        self._data = {r.name: EntryWriter(descriptor, r.data) for r in header.records}
        self._scale = {r.name: EntryWriter(descriptor, r.scale) for r in header.records if r.scale}

    def record(self, name: str) -> Record:
        return self._records[name]

    def write(self, piece: Piece) -> None:
        record = self._records[piece.name]
        data = piece.data
        if record.layout in (PANELS, PANELS_TRANSPOSED):
            data = pack(data, record.layout).data
            # A piece that is not the whole weight is some of its experts, and packing leaves the first dimension alone.
            whole = tuple(piece.data.shape) == record.shape
            self._packed_shapes[piece.name] = tuple(data.shape) if whole else (record.shape[0], *data.shape[1:])
        self._data[piece.name].write(data)
        size = data.nbytes
        if piece.scale is not None:
            self._scale[piece.name].write(piece.scale)
            size += piece.scale.nbytes
        with self._lock:
            self._done += size
            if self._progress is not None:
                self._progress(self._done, self._total, piece.name)

    def finish(self) -> Header:
        """The header with all checksums."""
        records = []
        for record in self._header.records:
            data = self._data[record.name].finish()
            data = replace(data, shape=self._packed_shapes.get(record.name, data.shape))
            scale = self._scale[record.name].finish() if record.scale else None
            records.append(replace(record, data=data, scale=scale))
        return replace(self._header, records=tuple(records))


def _run_groups(
    plan: Plan,
    checkpoint: Checkpoint,
    definition: Definition,
    quantization: Quantization | None,
    writers: _Writers,
    threads: int,
) -> None:
    stop = Event()

    def run(group: Group) -> None:
        dtype = writers.record(group.name).data.dtype
        for piece in pieces(group, checkpoint, definition, quantization, dtype):
            if stop.is_set():
                return
            _check_piece(piece, writers.record(piece.name), group)
            writers.write(piece)

    # torch's and zlib's loops release the interpreter's lock, as does writing.
    with ThreadPoolExecutor(threads) as pool:
        running = [pool.submit(run, group) for group in plan.groups]
        try:
            wait(running, return_when=FIRST_EXCEPTION)
        finally:
            failed = next((f for f in running if f.done() and not f.cancelled() and f.exception()), None)
            stop.set()
            for future in running:
                future.cancel()
    if failed is not None:
        raise failed.exception() or RuntimeError("conversion failed")


def _check_piece(piece: Piece, record: Record, group: Group) -> None:
    """What a converter made has the shape of the parameter, or of some of its experts."""
    for tensor, entry in ((piece.data, record.data), (piece.scale, record.scale)):
        if tensor is None or entry is None:
            continue
        shape = tuple(tensor.shape)
        if shape != entry.shape and not (group.stacks_experts and shape[1:] == entry.shape[1:]):
            raise ConversionError(
                f"{group.sources[0].data.file}: {entry.key} became {list(shape)}, but config.json makes it "
                f"{list(entry.shape)}."
            )


def _check_space(destination: Path, needed: int) -> None:
    parent = destination.absolute().parent
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise WeightFileError(
            f"The weight file {destination} needs {needed / 2**30:.1f} GiB, but {parent} has {free / 2**30:.1f} GiB "
            "free. Free some, or choose another place: `hpcgen convert MODEL_DIRECTORY FILE`, or set HPCGEN_CACHE."
        )
