"""What `hpcgen checkpoint show` prints: what is in a checkpoint directory, or in one file of it."""

import time
from collections import Counter
from pathlib import Path

import h5py

from hpcgen.checkpoint.columns import STATUS_CODES
from hpcgen.checkpoint.manifest import epochs
from hpcgen.checkpoint.reader import CheckpointReader
from hpcgen.checkpoint.writer import FORMAT
from hpcgen.errors import HpcgenError

RUN_CHECKPOINTS = ("checkpoints", "instances/*/checkpoints")
"""In a run directory: of its only instance, or of each."""


class NoCheckpoint(HpcgenError):
    """The path holds none."""


def show(path: Path) -> str:
    """Text for a checkpoint directory, for the run directory above it with all its instances, or for one HDF5 file.

    Raises:
        NoCheckpoint: there is nothing of that kind at `path`.
    """
    if path.is_file():
        return _show_file(path)
    if not path.is_dir():
        raise NoCheckpoint(f"{path} does not exist: give a run directory, its checkpoints/, or an .h5 file in it")
    within = [directory for pattern in RUN_CHECKPOINTS for directory in sorted(path.glob(pattern))]
    found = [directory for directory in (path, *within) if epochs(directory)]
    if not found:
        raise NoCheckpoint(f"{path} holds no finished checkpoint")
    if len(found) == 1:
        return _show_directory(found[0])
    return "\n\n".join(f"{directory.relative_to(path)}:\n{_show_directory(directory)}" for directory in found)


def _show_directory(directory: Path) -> str:
    warnings: list[str] = []
    checkpoint = CheckpointReader(directory, warnings.append).latest()
    lines = [f"warning: {warning}" for warning in warnings]
    if checkpoint is None:
        return "\n".join([*lines, "no epoch is whole: a run resumes from its journal alone"])
    manifest, sequences = checkpoint.manifest, checkpoint.sequences
    kv_tokens = sum(kv.tokens for kv in checkpoint.kv.values())
    requests = len({sequence.request for sequence in sequences})
    prompt, generated = sum(len(s.prompt) for s in sequences), sum(len(s.output) for s in sequences)
    needed = sum(sequence.prefill_target for sequence in sequences)
    lines += [
        f"epoch {manifest.epoch}, {_local_time(manifest.created)}, {len(manifest.files)} node(s)",
        f"{len(sequences):,} sequences of {requests:,} requests: {_statuses(s.status.name for s in sequences)}",
        f"tokens: {prompt:,} prompt, {generated:,} generated",
        f"KV: of {kv_tokens:,} of {needed:,} tokens, in {sum(len(kv.rows) for kv in checkpoint.kv.values()):,} pages",
    ]
    for file in manifest.files:
        left_out = f" ({file.pages_left_out:,} left out)" if file.pages_left_out else ""
        lines.append(f"  {file.name}: {file.sequences:,} sequences, {file.pages:,} pages{left_out}, {_size(file.size)}")
    older = [epoch for epoch in epochs(directory) if epoch != manifest.epoch]
    if older:
        lines.append(f"other epochs: {', '.join(map(str, older))}")
    return "\n".join(lines)


def _show_file(path: Path) -> str:
    try:
        with h5py.File(path, "r") as h5:
            if h5.attrs.get("format") != FORMAT:
                raise NoCheckpoint(f"{path} is no checkpoint of hpcgen")
            names = {code: name for name, code in STATUS_CODES.items()}
            statuses = _statuses(names[code] for code in h5["sequences/status"][...].tolist())
            lines = [
                f"epoch {h5.attrs['epoch']}, node {h5.attrs['node']}, {_local_time(h5.attrs['created'])}",
                f"{len(h5['sequences/id']):,} sequences: {statuses}",
                f"{len(h5['pages/index']):,} pages of KV",
                *(f"  {name} = {value}" for name, value in sorted(h5.attrs.items()) if name.startswith("page_layout.")),
                "datasets:",
            ]

            def describe(name: str, item: object) -> None:
                if isinstance(item, h5py.Dataset):
                    what = item.attrs.get("description", "")
                    lines.append(f"  {name:<40} {item.dtype!s:<8} {list(item.shape)!s:<16} {what}".rstrip())

            h5.visititems(describe)
            return "\n".join(lines)
    except (OSError, KeyError, RuntimeError, ValueError) as error:
        raise NoCheckpoint(f"{path} cannot be read as a checkpoint: {error}") from None


def _statuses(names: object) -> str:
    counts = Counter(names)  # type: ignore[call-overload]
    return ", ".join(f"{count:,} {name.lower()}" for name, count in counts.most_common()) or "none"


def _local_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
