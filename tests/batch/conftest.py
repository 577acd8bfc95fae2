"""A small real model directory: byte-level BPE trained on a few sentences, with a chat template; no weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from hpcgen.batch import BatchInput
from tests.tiny_tokenizer import VOCABULARY_SIZE, save_tokenizer


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny-model"
    save_tokenizer(directory)
    (directory / "config.json").write_text(
        json.dumps({"model_type": "llama", "vocab_size": VOCABULARY_SIZE, "eos_token_id": 1})
    )
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    return directory


@pytest.fixture(scope="session")
def tokenizer(model_directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_directory / "tokenizer.json"))


def _chat(custom_id: str = "a", **body: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "hello"}]} | body
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def _completion(custom_id: str = "a", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": "hello"} | body}


@pytest.fixture(scope="session")
def chat() -> Callable[..., dict[str, Any]]:
    """Makes a chat request as it stands in the input."""
    return _chat


@pytest.fixture(scope="session")
def completion() -> Callable[..., dict[str, Any]]:
    """Makes a completion request as it stands in the input."""
    return _completion


@pytest.fixture
def batch_input(tmp_path: Path) -> Callable[..., BatchInput]:
    """Writes lines, bytes as they are and others as JSON, and opens the file."""

    def write(lines: list[Any], **options: Any) -> BatchInput:
        path = tmp_path / "requests.jsonl"
        path.write_bytes(
            b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)
        )
        return BatchInput(path, **options)

    return write
