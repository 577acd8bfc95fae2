"""A tiny model, and one `LLM` of it for the whole room."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hpcgen.api import LLM
from tests.model.tiny_models import randomize
from tests.tiny_tokenizer import VOCABULARY_SIZE, save_tokenizer


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny-llama"
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=1,
    )
    randomize(LlamaForCausalLM(config), torch.float32).save_pretrained(directory)
    save_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The cache of weight files, here and in processes that a test starts."""
    directory = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPCGEN_CACHE", str(directory))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield directory


@pytest.fixture(scope="session")
def llm(model: Path, cache: Path) -> Iterator[LLM]:
    with LLM(model, host_memory=32 << 20, threads=1) as llm:
        yield llm
