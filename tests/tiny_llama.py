"""A Llama of some kilobytes with a real tokenizer: what tests of whole commands run on."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.model.tiny_models import randomize
from tests.tiny_tokenizer import VOCABULARY_SIZE, save_tokenizer


def save_tiny_llama(directory: Path, hidden_size: int = 64, context: int = 256) -> Path:
    """Writes a model directory, made if need be, and gives it; `context` in tokens."""
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 3 // 2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        eos_token_id=1,
    )
    randomize(LlamaForCausalLM(config), torch.float32).save_pretrained(directory)
    save_tokenizer(directory)
    return directory
