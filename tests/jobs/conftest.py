"""A tiny model with a tokenizer, and the command as a user runs it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.caches import own_cache
from tests.tiny_llama import save_tiny_llama

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """That of the command: a cache of its own, one thread."""
    return os.environ | {"HPCGEN_CACHE": own_cache(tmp_path_factory.mktemp("cache")), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def hpcgen(environment: dict[str, str]) -> Run:
    """Runs `hpcgen` with arguments, in a process of its own."""

    def run(*arguments: object, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "hpcgen.cli", *map(str, arguments)]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL
        )

    return run


def request(number: int, **body: Any) -> dict[str, Any]:
    """A chat request that runs to its length."""
    body = {
        "messages": [{"role": "user", "content": f"the fox number {number}"}],
        "max_tokens": 8 + number % 5,
        "temperature": 0,
        "ignore_eos": True,
    } | body
    return {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def write_requests(path: Path, requests: list[Any]) -> Path:
    """Requests as JSON lines; bytes and strings as they are."""
    lines = [r if isinstance(r, bytes) else (r if isinstance(r, str) else json.dumps(r)).encode() for r in requests]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]
