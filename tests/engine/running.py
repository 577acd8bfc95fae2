"""Runs tiny models through the engine, and through transformers for what the tokens must be."""

import dataclasses
from array import array
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from hpcgen.engine.build import Assembly, EngineOptions, build_engine, device_needs
from hpcgen.memory.budget import OutOfDeviceMemory
from hpcgen.memory.device_plan import divide_for_decode, divide_for_prefill
from hpcgen.model.causal import CausalModel
from hpcgen.model.conversion import convert
from hpcgen.model.weight_file import WeightFile
from hpcgen.sequence import SamplingParams, Sequence
from tests.model.tiny_models import save_tiny

Memory = Literal["in place", "resident", "streamed parameters", "streamed parameters and KV"]
OPTIONS = EngineOptions(
    max_model_len=192,
    dtype=torch.float32,
    host_memory=64 << 20,
    attention_microbatch=48,
    expert_batch=100,
    decision_steps=7,
)


class TinyModel:
    """A tiny model on disk: reference, directory and weight file."""

    def __init__(self, name: str, directory: Path):
        self.directory = directory / name
        self.reference: PreTrainedModel = save_tiny(name, self.directory, torch.float32)
        self.weights = WeightFile(convert(self.directory, directory / f"{name}.safetensors", torch.float32))

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """transformers' own tokens, the whole sequence computed anew for each."""
        tokens = list(prompt)
        with torch.inference_mode():
            for _ in range(count):
                logits = self.reference(torch.tensor([tokens]), use_cache=False).logits
                tokens.append(int(logits[0, -1].argmax()))
        return tokens[len(prompt) :]

    def assemble(self, memory: Memory = "in place", spare: int = 0, **options: Any) -> Assembly:
        """An engine whose device budget is the smallest that forces what `memory` says, and `spare` bytes."""
        chosen = dataclasses.replace(OPTIONS, **options)
        model = CausalModel.build(self.directory, chosen.dtype, chosen.device)
        if memory != "in place":
            chosen = dataclasses.replace(chosen, device_memory=_budget(model, self.weights, chosen, memory) + spare)
        return build_engine(model, self.weights, chosen, lambda sequence: None)  # type: ignore[arg-type,return-value]


def _budget(model: CausalModel, weights: WeightFile, options: EngineOptions, memory: Memory) -> int:
    """The smallest budget at which decode is divided as `memory` says, found by bisection."""
    needs = device_needs(model, weights, options)
    orders = ["too small", "streamed parameters and KV", "streamed parameters", "resident"]

    def division(limit: int) -> int:
        try:
            divide_for_prefill(limit, needs)
            decode = divide_for_decode(limit, needs)
        except OutOfDeviceMemory:
            return 0
        if decode.kv == "layers":
            return 1
        return 2 if decode.ring_slots else 3

    low, high = 0, 1 << 30
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if division(middle) >= orders.index(memory) else (middle, high)
    assert division(high) == orders.index(memory), f"no budget divides this model as {memory!r}"
    return high


def sequences(prompts: list[list[int]], **sampling: Any) -> list[Sequence]:
    options = {"max_tokens": 12, "temperature": 0.0} | sampling
    return [
        Sequence(i, i, 0, array("I", prompt), SamplingParams(**options, key=1000 + i))
        for i, prompt in enumerate(prompts)
    ]


def prompts(lengths: tuple[int, ...], seed: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 256, (n,), generator=generator).tolist() for n in lengths]


def run(assembly: Assembly, batch: list[Sequence], most_steps: int = 2000) -> list[Sequence]:
    """Adds all, runs to the end, and returns the sequences in the order in which they ended."""
    for sequence in batch:
        assembly.engine.add(sequence)
    ended = []
    for _ in range(most_steps):
        if not assembly.engine.pending:
            break
        ended += assembly.engine.step()
    assert not assembly.engine.pending, "the engine does not come to an end"
    assert assembly.store.free == assembly.store.count, "pages were lost"
    assembly.device.close()
    return ended


def tokens(batch: list[Sequence]) -> list[list[int]]:
    return [list(sequence.output) for sequence in batch]
