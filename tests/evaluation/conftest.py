import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.caches import own_cache
from tests.tiny_tokenizer import VOCABULARY_SIZE, save_tokenizer

WORDS = "the quick brown fox jumps over the lazy dog, and stops "
TASK = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: ["fox", "dog", "quick brown"]
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""


@pytest.fixture(scope="session")
def directory(tmp_path_factory) -> Path:
    """A tiny model; what it generates is text."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    # No bytes that are no characters by themselves, and no special tokens but the last, in whose names the harness'
    # own model looks for stop strings too.
    model.lm_head.weight.data[97:] = 0
    model.lm_head.weight.data[[0, 2]] = 0
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    return Path(own_cache(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def task(tmp_path) -> Path:
    """A directory with the definition and the data of the task `tiny_choice`."""
    documents = [{"question": "the quick brown", "answer": i % 3} for i in range(3)]
    documents += [{"question": WORDS * (1 + i % 5), "answer": i % 3} for i in range(12)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, documents)))
    (tmp_path / "tiny.yaml").write_text(TASK.format(data=tmp_path / "data.jsonl"))
    return tmp_path
