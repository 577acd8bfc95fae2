"""The requests of the benchmark: OpenAI Batch lines for /v1/completions in which every engine does the same work.

Prompts are cuts of English text (the language reference that every Python carries) of an exact number of tokens.
`ignore_eos` and `min_tokens` = `max_tokens` fix the number of output tokens.
"""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics

from transformers import AutoTokenizer

Lengths = Callable[[random.Random, int], Iterator[tuple[int, int]]]
"""(source of chance, requests) -> tokens in and out of each."""


def even(prompt: int, output: int) -> Lengths:
    return lambda chance, count: iter([(prompt, output)] * count)


def long_tailed(chance: random.Random, count: int) -> Iterator[tuple[int, int]]:
    """Median 96 tokens out, up to 1,024."""
    for _ in range(count):
        yield chance.randint(32, 512), min(1024, max(16, int(chance.lognormvariate(4.564, 0.9))))


WORKLOADS: dict[str, Lengths] = {"W1": even(128, 128), "W2": long_tailed, "W3": even(1024, 16), "short": even(32, 16)}
"""In full, W1 and W2 are 512 requests and W3 256."""


def write(name: str, count: int, tokenizer_directory: Path, file: Path, lengths: Lengths | None = None) -> Path:
    """The first `count` requests of a workload (or of `lengths`), the same ones for the same tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_directory)
    text = "\n\n".join(topics[key] for key in sorted(topics))
    stream = tokenizer(text, add_special_tokens=False)["input_ids"]
    chance = random.Random(name)
    lengths = lengths or WORKLOADS[name]
    cuts: dict[int, list[str]] = {}
    with file.open("w") as out:
        for index, (prompt, output) in enumerate(lengths(chance, count)):
            kept = cuts.setdefault(prompt, [])
            # A thousand prompts of a length are enough: nothing is shared between requests.
            text = _cut(tokenizer, stream, chance, prompt) if len(kept) < 1000 else kept[index % 1000]
            kept.append(text)
            body = {
                "model": "m", "prompt": text, "max_tokens": output, "min_tokens": output, "ignore_eos": True,
                "temperature": 0,
            }  # fmt: skip
            line = {"custom_id": f"{name}-{index}", "method": "POST", "url": "/v1/completions", "body": body}
            out.write(json.dumps(line) + "\n")
    return file


def _cut(tokenizer, stream: list[int], chance: random.Random, length: int) -> str:  # type: ignore[no-untyped-def]
    while True:
        start = chance.randrange(len(stream) - length)
        text = tokenizer.decode(stream[start : start + length])
        if len(tokenizer(text)["input_ids"]) == length:
            return text
