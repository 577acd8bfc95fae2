"""A Hugging Face checkpoint on disk: which tensors it has, where, and how it is quantised. Loads them one at a time."""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hpcgen.model.errors import ModelError
from hpcgen.model.weight_format import DTYPES

INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True)
class SourceTensor:
    """One tensor of the checkpoint."""

    key: str
    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


class Checkpoint:
    """The *.safetensors files of a model directory, single or sharded.

    Raises:
        ModelError: no safetensors, a missing shard, or a file that is damaged.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.files = _weight_files(directory)
        self._open: dict[Path, Any] = {}
        self.tensors: dict[str, SourceTensor] = {}
        """By key."""
        for file in self.files:
            handle = self._handle(file)
            for key in handle.keys():  # noqa: SIM118 -- not a mapping
                described = handle.get_slice(key)
                name = described.get_dtype()
                if name not in DTYPES:
                    raise ModelError(f"{file}: tensor {key} has dtype {name}, which is not supported.")
                self.tensors[key] = SourceTensor(key, file, tuple(described.get_shape()), DTYPES[name])

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json."""
        return json.loads((self.directory / "config.json").read_text())

    def load(self, tensor: SourceTensor) -> torch.Tensor:
        """Reads a tensor; the memory is the page cache's as long as nothing copies it."""
        return self._handle(tensor.file).get_tensor(tensor.key)

    def _handle(self, file: Path) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as problem:
                raise ModelError(f"{file} cannot be read ({problem}). Is it downloaded completely?") from problem
        return self._open[file]


def source_fingerprint(directory: Path) -> str:
    """Changes when the checkpoint does: from names, sizes and modification times of its files, and config.json.

    Raises:
        ModelError: no config.json or no safetensors.
    """
    config = directory / "config.json"
    if not config.is_file():
        raise ModelError(f"{directory} is not a model directory: it has no config.json. Give --model a directory.")
    digest = hashlib.sha256(config.read_bytes())
    for file in _weight_files(directory):
        state = file.stat()
        digest.update(f"{file.name}\0{state.st_size}\0{state.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def _weight_files(directory: Path) -> list[Path]:
    index = directory / INDEX_FILE
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise ModelError(f"{index} is not a safetensors index ({problem}).") from problem
        files = [directory / name for name in names]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ModelError(
                f"{directory} lacks {len(missing)} of the {len(files)} files that {INDEX_FILE} names: "
                f"{', '.join(missing[:3])}. Download them."
            )
        return files
    whole = directory / "model.safetensors"
    files = [whole] if whole.is_file() else sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{directory} has no *.safetensors. {_remedy(directory)}")
    return files


def _remedy(directory: Path) -> str:
    gguf = sorted(directory.glob("*.gguf"))
    if gguf:
        return (
            f"Convert its GGUF once: AutoModelForCausalLM.from_pretrained('{directory}', gguf_file='{gguf[0].name}')"
            ".save_pretrained(NEW_DIRECTORY), and the same with AutoTokenizer."
        )
    if any(directory.glob("*.bin")) or any(directory.glob("*.pth")):
        return (
            f"Convert its PyTorch files once: AutoModelForCausalLM.from_pretrained('{directory}', dtype='auto')"
            ".save_pretrained(NEW_DIRECTORY), and copy the tokenizer's files."
        )
    return "Download the weights of the model, not only its configuration."
