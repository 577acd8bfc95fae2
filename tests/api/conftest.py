"""A tiny model, and one `LLM` of it for the whole room."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcgen.api import LLM
from tests.caches import own_cache
from tests.tiny_llama import save_tiny_llama


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The cache of weight files, here and in processes that a test starts."""
    directory = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPCGEN_CACHE", own_cache(directory))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield directory


@pytest.fixture(scope="session")
def llm(model: Path, cache: Path) -> Iterator[LLM]:
    with LLM(model, host_memory=32 << 20, threads=1) as llm:
        yield llm
