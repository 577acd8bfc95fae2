"""What tells one model directory from another, without reading hundreds of gigabytes of weights."""

import hashlib
from pathlib import Path

from hpcgen.errors import HpcgenError

_WEIGHT_SUFFIXES = {".safetensors", ".gguf", ".bin", ".pt", ".pth"}
_SAMPLE_BYTES = 2**20
_SMALL_BYTES = 64 * 2**20
_OTHER_SUFFIXES = {".json", ".jinja", ".model", ".txt", ".tiktoken"}


class ModelDirectoryError(HpcgenError):
    """The model directory is none, or cannot be read."""


def model_fingerprint(directory: str | Path) -> str:
    """SHA-256 over names, sizes and contents of what decides a model's answers.

    Configuration and tokenizer files count whole; of a weight file the name, the size, and a mebibyte at the start
    (where the table of tensors lies), the middle and the end. Modification times do not count: a copy of a model is
    that model.

    Raises:
        ModelDirectoryError: there is no config.json, or a file cannot be read.
    """
    directory = Path(directory)
    if not (directory / "config.json").is_file():
        raise ModelDirectoryError(
            f"{directory} is not a model directory: it has no config.json; give a Hugging Face directory with --model"
        )
    digest = hashlib.sha256()
    try:
        for path in sorted(directory.iterdir()):
            if path.suffix not in _WEIGHT_SUFFIXES | _OTHER_SUFFIXES or not path.is_file():
                continue
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            with path.open("rb") as file:
                if size <= _SMALL_BYTES and path.suffix in _OTHER_SUFFIXES:
                    digest.update(file.read())
                    continue
                for start in (0, size // 2, max(size - _SAMPLE_BYTES, 0)):
                    file.seek(start)
                    digest.update(file.read(_SAMPLE_BYTES))
    except OSError as error:
        raise ModelDirectoryError(f"cannot read the model in {directory}: {error}") from None
    return digest.hexdigest()
