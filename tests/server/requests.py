"""Input files of batches."""

import json
from typing import Any

MODEL = "tiny-llama"


def line(number: int | str, url: str = "/v1/completions", **body: Any) -> bytes:
    """A request of a few tokens."""
    body = {"model": MODEL, "prompt": [40, 41, 42], "max_tokens": 4, "ignore_eos": True, **body}
    return json.dumps({"custom_id": f"r{number}", "method": "POST", "url": url, "body": body}).encode() + b"\n"


def input_file(requests: int, **body: Any) -> bytes:
    return b"".join(line(number, **body) for number in range(requests))
