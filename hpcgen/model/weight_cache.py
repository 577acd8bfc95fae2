"""Converts a checkpoint at its first use, and finds the weight file again at all later ones."""

import hashlib
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from hpcgen.model.architecture import read_config
from hpcgen.model.atomic_file import remove_abandoned
from hpcgen.model.conversion.checkpoint import Checkpoint, source_fingerprint
from hpcgen.model.conversion.convert import Progress, convert
from hpcgen.model.conversion.definition import Definition, target_dtype
from hpcgen.model.conversion.layout_choice import layout_choice, layout_version
from hpcgen.model.conversion.plan import plan_conversion
from hpcgen.model.conversion_lock import ConversionLock
from hpcgen.model.quantization import quantization_of
from hpcgen.model.weight_file import WeightFile
from hpcgen.model.weight_format import VERSION, WeightFileError

_LONGEST_PAUSE = 2.0  # seconds between two looks at a conversion that another process is doing


def cache_directory() -> Path:
    """$HPCGEN_CACHE, else $XDG_CACHE_HOME/hpcgen, else ~/.cache/hpcgen."""
    if own := os.environ.get("HPCGEN_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hpcgen"


def cached_weight_file(
    model_directory: str | os.PathLike,
    dtype: torch.dtype | None = None,
    layout: str = "plain",
    cache: Path | None = None,
    progress: Progress | None = None,
    waiting: Callable[[str], None] | None = None,
    threads: int | None = None,
) -> Path:
    """The weight file of a model directory, converted now if the cache does not have it.

    The file is found by the names, sizes and times of the checkpoint's files, its configuration, and the options. If
    another process, here or on another node, is converting the same, this waits for its file. What killed processes
    left behind is removed.

    Args:
        dtype, layout, progress, threads: as in `convert`.
        cache: directory; None takes `cache_directory()`.
        waiting: called once, with a message, if another process is converting.

    Raises:
        ModelError, ConversionError, WeightFileError: as `convert`; WeightFileError also for an unwritable cache.
    """
    directory = Path(model_directory)
    cache = cache or cache_directory()
    path = cache / _file_name(directory, dtype, layout)
    if _is_whole(path):
        return path
    _make_writable(cache)
    lock = ConversionLock(path.with_suffix(".lock"))
    pause = 0.05
    while not lock.acquire():
        if _is_whole(path):
            return path
        if waiting is not None:
            waiting(f"{lock.holder()} is converting {directory}; waiting for its weight file {path}")
            waiting = None
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    try:
        # It may have been finished between the look above and taking the lock.
        if not _is_whole(path):
            convert(directory, path, dtype, layout, progress, threads)
        remove_abandoned(cache)
    finally:
        lock.release()
    return path


def check_checkpoint(model_directory: str | os.PathLike, dtype: torch.dtype | None, layout: str) -> None:
    """Before any work: whether the checkpoint can be converted, as far as its headers tell. Quick where it was.

    Raises:
        ModelError, ConversionError: as `convert`.
    """
    directory = Path(model_directory)
    if _is_whole(cache_directory() / _file_name(directory, dtype, layout)):
        return
    definition = Definition(directory, dtype)
    checkpoint = Checkpoint(directory)
    quantization = quantization_of(checkpoint.config)
    plan_conversion(checkpoint, definition, quantization, layout_choice(layout, definition))


def _file_name(directory: Path, dtype: torch.dtype | None, layout: str) -> str:
    fingerprint = source_fingerprint(directory)
    target = str(target_dtype(read_config(directory)[1], dtype)).removeprefix("torch.")
    # Names and shapes of parameters are transformers' own, and may change with its minor versions.
    definitions = transformers.__version__.rsplit(".", 1)[0]
    origin = [VERSION, definitions, fingerprint, target, *layout_version(layout)]
    key = hashlib.sha256(json.dumps(origin).encode()).hexdigest()
    name = re.sub(r"[^A-Za-z0-9._-]", "-", directory.resolve().name)
    return f"{name}-{target}-{layout}-{key[:16]}.safetensors"


def _is_whole(path: Path) -> bool:
    """Whether a usable weight file is there; `verify` would also read all of it."""
    try:
        WeightFile(path)
    except WeightFileError:
        return False
    return True


def _make_writable(cache: Path) -> None:
    try:
        cache.mkdir(parents=True, exist_ok=True)
        writable = os.access(cache, os.W_OK | os.X_OK)
    except OSError:
        writable = False
    if not writable:
        raise WeightFileError(
            f"The cache directory {cache} cannot be written. Set HPCGEN_CACHE to a directory on fast shared storage, "
            "or convert by hand: `hpcgen convert MODEL_DIRECTORY FILE`."
        )
