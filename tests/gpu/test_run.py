import json

import pytest
import torch

from hpcgen.cli import main
from tests.caches import own_cache
from tests.tiny_llama import save_tiny_llama

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("model"), hidden_size=128, context=512)


def answers(model, directory, monkeypatch, *options):
    monkeypatch.setenv("HPCGEN_CACHE", own_cache(directory / "cache"))
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
