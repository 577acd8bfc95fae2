"""Lengths of the sequences of a batch: given by a distribution, or by a file of requests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcgen.planner.errors import PlanError

CHARACTERS_PER_TOKEN = 4.0
DEFAULT_OUTPUT = 1024
"""Output tokens of a request that sets no limit, where nothing better is known."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Tokens of each sequence, int64 [sequences]: prompt, output that it will have, output that it may have."""

    prompts: NDArray[np.int64]
    outputs: NDArray[np.int64]
    most: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def prompt_tokens(self) -> int:
        return int(self.prompts.sum())

    @property
    def output_tokens(self) -> int:
        return int(self.outputs.sum())

    @property
    def mean_context(self) -> float:
        """Tokens of context of a decoding sequence, as the mean over all decode steps."""
        steps = np.maximum(self.outputs, 1)
        return float(((self.prompts + steps / 2) * steps).sum() / steps.sum())

    def first(self, count: int) -> Workload:
        return Workload(self.prompts[:count], self.outputs[:count], self.most[:count])

    def sized(self, count: int, seed: int = 0) -> Workload:
        """`count` sequences drawn from these, with replacement."""
        chosen = np.random.default_rng(seed).integers(0, len(self), count)
        return Workload(self.prompts[chosen], self.outputs[chosen], self.most[chosen])

    @classmethod
    def of(cls, prompts: NDArray[Any], outputs: NDArray[Any], most: NDArray[Any] | None = None) -> Workload:
        """Lengths cut to at least 1 token; `most` is at least the output."""
        prompts = np.maximum(np.asarray(prompts, dtype=np.int64), 1)
        outputs = np.maximum(np.asarray(outputs, dtype=np.int64), 1)
        limit = outputs if most is None else np.maximum(np.asarray(most, dtype=np.int64), outputs)
        return cls(prompts, outputs, limit)


def draw(specification: str, count: int, seed: int = 0) -> NDArray[np.int64]:
    """Lengths from 'fixed:512', 'uniform:1:1024' or 'lognormal:MEDIAN:SIGMA[:LONGEST]'. Raises PlanError."""
    kind, *numbers = specification.split(":")
    generator = np.random.default_rng(seed)
    try:
        values = [float(number) for number in numbers]
        if kind == "fixed" and len(values) == 1:
            lengths = np.full(count, values[0])
        elif kind == "uniform" and len(values) == 2:
            lengths = generator.integers(int(values[0]), int(values[1]) + 1, count).astype(float)
        elif kind == "lognormal" and len(values) in (2, 3):
            lengths = generator.lognormal(np.log(values[0]), values[1], count)
            lengths = np.minimum(lengths, values[2] if len(values) == 3 else np.inf)
        else:
            raise ValueError
    except ValueError:
        raise PlanError(
            f"{specification!r} is no length distribution: write fixed:512, uniform:1:1024 or "
            "lognormal:MEDIAN:SIGMA[:LONGEST]"
        ) from None
    return np.maximum(lengths.astype(np.int64), 1)


def read_requests(file: Path, sample: int = 200_000) -> Workload:
    """Lengths of the requests of an OpenAI Batch file. Lines that are none are left out: `run` reports them.

    Raises PlanError where none is left.
    """
    workload = of_bodies(_objects(file, sample, lambda line: line.get("body")))
    if workload is None:
        raise PlanError(f"{file} has no request that could be planned for")
    return workload


def of_bodies(bodies: Iterable[dict[str, Any]], longest: int | None = None) -> Workload | None:
    """Lengths of requests: prompts by their characters, outputs by what they may have. None without any.

    With `longest`, the most tokens of a sequence, nothing is longer, and an output without a limit may go so far; it is
    taken to have DEFAULT_OUTPUT tokens.
    """
    prompts, outputs, most = [], [], []
    for body in bodies:
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        for tokens in _prompt_tokens(body):
            samples = body.get("n") or 1
            prompts += [tokens] * samples
            outputs += [limit or DEFAULT_OUTPUT] * samples
            most += [limit or longest or DEFAULT_OUTPUT] * samples
    if not prompts:
        return None
    workload = Workload.of(np.array(prompts), np.array(outputs), np.array(most))
    if longest is None:
        return workload
    lengths = np.minimum(workload.prompts, max(longest - 1, 1))
    return Workload.of(
        lengths, np.minimum(workload.outputs, longest - lengths), np.minimum(workload.most, longest - lengths)
    )


def read_output_lengths(file: Path, sample: int = 200_000) -> NDArray[np.int64]:
    """Output tokens of the results of an earlier batch (usage.completion_tokens). Raises PlanError."""

    def tokens(line: dict[str, Any]) -> Any:
        return ((line.get("response") or {}).get("body") or {}).get("usage")

    lengths = [usage.get("completion_tokens", 0) for usage in _objects(file, sample, tokens)]
    if not lengths:
        raise PlanError(f"{file} has no result with a usage: give the output of an earlier run")
    return np.maximum(np.array(lengths, dtype=np.int64), 1)


def _objects(file: Path, sample: int, pick: Callable[[dict[str, Any]], Any]) -> list[dict[str, Any]]:
    found = []
    try:
        with open(file, "rb") as lines:
            for line in lines:
                try:
                    content = json.loads(line)
                except ValueError:
                    continue
                picked = pick(content) if isinstance(content, dict) else None
                if isinstance(picked, dict):
                    found.append(picked)
                if len(found) >= sample:
                    break
    except OSError as error:
        raise PlanError(f"{file} cannot be read: {error.strerror}") from None
    return found


def _prompt_tokens(body: dict[str, Any]) -> list[float]:
    """Tokens of each prompt of a request; of a text, by its characters."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return [len(prompt) / CHARACTERS_PER_TOKEN]
    if isinstance(prompt, list) and prompt:
        if isinstance(prompt[0], int):
            return [len(prompt)]
        return [len(part) / (CHARACTERS_PER_TOKEN if isinstance(part, str) else 1) for part in prompt]
    total = 0.0
    for message in body.get("messages") or []:
        content = message.get("content") if isinstance(message, dict) else None
        parts = content if isinstance(content, list) else [{"text": content}]
        total += sum(len(part.get("text") or "") for part in parts if isinstance(part, dict))
        total += 16  # what a chat template adds to a message
    return [total / CHARACTERS_PER_TOKEN] if total else []
