import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hpcgen.cli import main
from tests.model.tiny_models import randomize
from tests.tiny_tokenizer import VOCABULARY_SIZE, save_tokenizer

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=1,
    )
    randomize(LlamaForCausalLM(config), torch.float32).save_pretrained(directory)
    save_tokenizer(directory)
    return directory


def answers(model, directory, monkeypatch, *options):
    monkeypatch.setenv("HPCGEN_CACHE", str(directory / "cache"))
    directory.mkdir(exist_ok=True)
    lines = []
    for number in range(24):
        body = {
            "messages": [{"role": "user", "content": f"the fox number {number} jumps"}],
            "max_tokens": 20 + 3 * number,
            "temperature": 0,
            "ignore_eos": True,
        }
        lines.append({"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body})
    (directory / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    output = directory / "out.jsonl"
    words = ["run", "--model", model, "--input", directory / "in.jsonl", "--output", output, *options]
    assert main([str(word) for word in words]) == 0
    bodies = [json.loads(line)["response"]["body"] for line in output.read_text().split("\n") if line]
    return [body["choices"][0]["message"]["content"] for body in bodies]


def test_a_run_gives_the_tokens_of_the_cpu(cuda, model, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    expected = answers(model, tmp_path / "cpu", monkeypatch, "--device", "cpu")
    assert answers(model, tmp_path / "cuda", monkeypatch, "--device", "cuda") == expected


def test_a_device_budget_too_small_for_the_model_gives_the_same_tokens(cuda, model, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    expected = answers(model, tmp_path / "all", monkeypatch, "--device", "cuda")
    little = ("--device", "cuda", "--device-memory", "6MB", "--attention-microbatch", 64, "--expert-batch", 128)
    assert answers(model, tmp_path / "little", monkeypatch, *little) == expected


def test_bf16_runs_to_the_end(cuda, model, tmp_path, monkeypatch):
    assert len(answers(model, tmp_path / "run", monkeypatch, "--device", "cuda", "--dtype", "bfloat16")) == 24
