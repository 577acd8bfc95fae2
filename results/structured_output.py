"""What structured output costs in a decode step: the time of its masks beside that of sampling itself.

OMP_NUM_THREADS=1 python results/structured_output.py --model DIR    # the table of results/structured_output.md
"""

import argparse
import json
import time
from array import array
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer

from hpcgen.engine.sampling import sample
from hpcgen.engine.stopping import Stopping
from hpcgen.engine.structured import StructuredOutput
from hpcgen.sequence import Grammar, SamplingParams, Sequence

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
        "address": {"type": "object", "properties": {"street": {"type": "string"}, "zip": {"type": "string"}}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
GRAMMARS = {
    "sampling": None,
    "any JSON object": Grammar("json_schema", '{"type": "object", "additionalProperties": true}'),
    "schema of 4 properties": Grammar("json_schema", json.dumps(PERSON)),
    "regular expression": Grammar("regex", r"([A-Z][a-z]{2,12} ){1,40}[0-9]{4}"),
}
BATCHES = (1, 16, 64)
STEPS = 12
ROUNDS = 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    model = parser.parse_args().model
    vocabulary = AutoConfig.from_pretrained(model).vocab_size
    end = AutoTokenizer.from_pretrained(model).eos_token_id
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    print(f"Sampling at temperature 1 from random logits, {vocabulary:,} tokens, one thread; milliseconds a step.")
    print("The row `sampling` is all of it without grammars, the others are what the masks of all rows add.")
    print("`compile` is the first use of a grammar, on a thread of its own while prompts are prefilled.\n")
    print("| grammar | compile, ms | " + " | ".join(f"batch {batch}" for batch in BATCHES) + " |")
    print("|---|---:|" + "---:|" * len(BATCHES))
    structured = StructuredOutput(model, vocabulary)
    structured.prepare(_sequence(0, GRAMMARS["any JSON object"], end))
    sample(torch.zeros(1, vocabulary), [_sequence(0, GRAMMARS["any JSON object"], end)], structured)
    for name, grammar in GRAMMARS.items():
        compiler = StructuredOutput(model, vocabulary)
        compiler.prepare(_sequence(0, GRAMMARS["regular expression"], end))
        sample(torch.zeros(1, vocabulary), [_sequence(0, Grammar("regex", "a"), end)], compiler)  # tokenizer is read
        start = time.perf_counter()
        sample(torch.zeros(1, vocabulary), [_sequence(1, grammar, end)], compiler)
        compile_ms = "" if grammar is None else f"{(time.perf_counter() - start) * 1e3:.0f}"
        cells = [f"{_step_ms(structured, grammar, batch, vocabulary, end, generator):.2f}" for batch in BATCHES]
        print(f"| {name} | {compile_ms} | {' | '.join(cells)} |", flush=True)


def _step_ms(
    structured: StructuredOutput,
    grammar: Grammar | None,
    batch: int,
    vocabulary: int,
    end: int,
    generator: torch.Generator,
) -> float:
    """Least of several rounds; sequences that end are replaced by new ones."""
    best = float("inf")
    stopping = Stopping(lambda sequence: None)  # type: ignore[arg-type,return-value]
    for _ in range(ROUNDS):
        sequences = [_sequence(row, grammar, end) for row in range(batch)]
        logits = torch.randn(batch, vocabulary, generator=generator)
        total = 0.0
        for _ in range(STEPS):
            masked = logits[torch.randperm(batch, generator=generator)]
            start = time.perf_counter()
            if grammar is None:
                sample(masked, sequences)
            else:
                structured.mask(masked, sequences)
            total += time.perf_counter() - start
            tokens = masked.argmax(dim=-1).tolist()
            for row, token in enumerate(tokens):
                if stopping.append(sequences[row], token):
                    structured.forget(sequences[row])
                    sequences[row] = _sequence(row, grammar, end)
        for sequence in sequences:
            structured.forget(sequence)
        best = min(best, total / STEPS * 1e3)
    return best


def _sequence(number: int, grammar: Grammar | None, end: int) -> Sequence:
    sampling = SamplingParams(max_tokens=1000, key=number, stop_token_ids=(end,), grammar=grammar)
    return Sequence(number, number, 0, array("I", [5]), sampling)


if __name__ == "__main__":
    main()
