"""Sequences as columns: flat typed arrays that HDF5 stores and any reader understands without this program.

Column c of S sequences is an array [S]. What is ragged is `name/values` with `name/offsets` [S + 1]: row s is
values[offsets[s] : offsets[s + 1]]. Strings are UTF-8 bytes (uint8). Host pages are no column: see `writer`.
"""

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import fields
from itertools import pairwise
from typing import Any

import numpy as np

from hpcgen.sequence import Grammar, SamplingParams, Sequence, Status, TokenLogprob

Columns = dict[str, np.ndarray]

STATUS_CODES = {status.name: code for code, status in enumerate(Status)}
"""Names and codes of the column `status`."""
NO_LOGPROBS = -1

_SEQUENCE_SCALARS: dict[str, type] = {"id": np.int64, "request": np.int64, "sample": np.int32, "kv_length": np.int64}
_SAMPLING_SCALARS: dict[str, type] = {
    "max_tokens": np.int64,
    "min_tokens": np.int64,
    "temperature": np.float64,
    "top_p": np.float64,
    "top_k": np.int64,
    "min_p": np.float64,
    "key": np.uint64,
    "presence_penalty": np.float64,
    "frequency_penalty": np.float64,
    "repetition_penalty": np.float64,
    "prompt_logprobs_start": np.int64,
}
_COUNTS = ("logprobs", "prompt_logprobs")
"""Names of sampling options, and of the log-probabilities of a sequence that they ask for."""
_TEXTS = ("finish_reason", "text", "error")

STORED_FIELDS = {*_SEQUENCE_SCALARS, *_TEXTS, "status", "prompt", "output", "sampling", "logprobs", "prompt_logprobs"}
STORED_SAMPLING_FIELDS = {
    *_SAMPLING_SCALARS, "logprobs", "prompt_logprobs", "stop", "stop_token_ids", "logit_bias", "grammar",
}  # fmt: skip


def encode(sequences: list[Sequence]) -> Columns:
    """The columns of `sequences`; copies, so that the sequences may change afterwards."""
    missing = {f.name for f in fields(SamplingParams)} - STORED_SAMPLING_FIELDS
    if missing:
        raise TypeError(f"sampling parameters without a column: {sorted(missing)}")
    columns: Columns = {}
    for name, dtype in _SEQUENCE_SCALARS.items():
        columns[name] = np.array([getattr(s, name) for s in sequences], dtype)
    columns["status"] = np.array([STATUS_CODES[s.status.name] for s in sequences], np.uint8)
    _put_ragged(columns, "prompt", (np.frombuffer(s.prompt, np.uint32) for s in sequences), np.uint32)
    _put_ragged(columns, "output", (np.frombuffer(s.output, np.uint32) for s in sequences), np.uint32)
    for name in _TEXTS:
        _put_texts(columns, name, [getattr(s, name) for s in sequences])
    for name, dtype in _SAMPLING_SCALARS.items():
        columns[f"sampling/{name}"] = np.array([getattr(s.sampling, name) for s in sequences], dtype)
    for name in _COUNTS:
        counts = [getattr(s.sampling, name) for s in sequences]
        columns[f"sampling/{name}"] = np.array([NO_LOGPROBS if c is None else c for c in counts], np.int32)
    stops = [s.sampling.stop for s in sequences]
    columns["sampling/stop/offsets"] = _offsets(len(stop) for stop in stops)
    _put_texts(columns, "sampling/stop/strings", [text for stop in stops for text in stop])
    _put_ragged(columns, "sampling/stop_token_ids", (s.sampling.stop_token_ids for s in sequences), np.uint32)
    bias = [s.sampling.logit_bias for s in sequences]
    _put_ragged(columns, "sampling/logit_bias/tokens", ([t for t, _ in b] for b in bias), np.uint32)
    _put_ragged(columns, "sampling/logit_bias/biases", ([v for _, v in b] for b in bias), np.float64)
    for name in Grammar._fields:
        texts = [getattr(s.sampling.grammar, name, None) for s in sequences]
        _put_texts(columns, f"sampling/grammar/{name}", texts)
    for name in _COUNTS:
        _put_logprobs(columns, name, [getattr(s, name) for s in sequences])
    return columns


def decode(columns: Mapping[str, np.ndarray]) -> list[Sequence]:
    """The sequences of `columns`; they own no pages. Raises KeyError, IndexError or ValueError for damaged columns."""
    count = len(columns["id"])
    scalars: dict[str, list[Any]] = {name: columns[name].tolist() for name in _SEQUENCE_SCALARS}
    names = {code: Status[name] for name, code in STATUS_CODES.items()}
    statuses = [names[code] for code in columns["status"].tolist()]
    scalars |= {name: _get_texts(columns, name) for name in _TEXTS}
    prompts, outputs = _get_ragged(columns, "prompt"), _get_ragged(columns, "output")
    samplings = _get_sampling(columns)
    logprobs, prompt_logprobs = (_get_logprobs(columns, name) for name in _COUNTS)
    return [
        Sequence(
            **{name: values[i] for name, values in scalars.items()},
            status=statuses[i],
            prompt=array("I", prompts[i].tobytes()),
            output=array("I", outputs[i].tobytes()),
            sampling=samplings[i],
            logprobs=logprobs[i],
            prompt_logprobs=prompt_logprobs[i],
        )
        for i in range(count)
    ]


def _offsets(lengths: Iterable[int]) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(np.fromiter(lengths, np.int64)))).astype(np.int64)


def _put_ragged(columns: Columns, name: str, rows: Iterable[Any], dtype: type) -> None:
    arrays: list[np.ndarray] = [np.asarray(row, dtype) for row in rows]
    columns[f"{name}/values"] = np.concatenate(arrays) if arrays else np.empty(0, dtype)
    columns[f"{name}/offsets"] = _offsets(len(a) for a in arrays)


def _get_ragged(columns: Mapping[str, np.ndarray], name: str) -> list[np.ndarray]:
    values = columns[f"{name}/values"]
    return [values[a:b] for a, b in pairwise(columns[f"{name}/offsets"].tolist())]


def _put_texts(columns: Columns, name: str, texts: list[str | None]) -> None:
    _put_ragged(columns, name, (np.frombuffer((t or "").encode(), np.uint8) for t in texts), np.uint8)
    columns[f"{name}/present"] = np.array([t is not None for t in texts], np.uint8)


def _get_texts(columns: Mapping[str, np.ndarray], name: str) -> list[str | None]:
    present = columns[f"{name}/present"].tolist()
    rows = _get_ragged(columns, name)
    return [row.tobytes().decode() if here else None for row, here in zip(rows, present, strict=True)]


def _get_sampling(columns: Mapping[str, np.ndarray]) -> list[SamplingParams]:
    scalars = {name: columns[f"sampling/{name}"].tolist() for name in _SAMPLING_SCALARS}
    logprobs, prompt_logprobs = (
        [None if count == NO_LOGPROBS else count for count in columns[f"sampling/{name}"].tolist()] for name in _COUNTS
    )
    strings = _get_texts(columns, "sampling/stop/strings")
    stop_offsets = columns["sampling/stop/offsets"].tolist()
    stops = [tuple(text or "" for text in strings[a:b]) for a, b in pairwise(stop_offsets)]
    stop_tokens = _get_ragged(columns, "sampling/stop_token_ids")
    bias_tokens = _get_ragged(columns, "sampling/logit_bias/tokens")
    biases = _get_ragged(columns, "sampling/logit_bias/biases")
    kinds, texts = (_get_texts(columns, f"sampling/grammar/{name}") for name in Grammar._fields)
    return [
        SamplingParams(
            **{name: values[i] for name, values in scalars.items()},
            logprobs=logprobs[i],
            prompt_logprobs=prompt_logprobs[i],
            stop=stops[i],
            stop_token_ids=tuple(stop_tokens[i].tolist()),
            logit_bias=tuple(zip(bias_tokens[i].tolist(), biases[i].tolist(), strict=True)),
            grammar=None if kinds[i] is None else Grammar(kinds[i], texts[i]),  # type: ignore[arg-type]
        )
        for i in range(len(logprobs))
    ]


def _put_logprobs(columns: Columns, name: str, rows: list[list[TokenLogprob]]) -> None:
    """`name` is ragged by sequence, its `top` ragged by entry."""
    entries = [entry for row in rows for entry in row]
    columns[f"{name}/offsets"] = _offsets(len(row) for row in rows)
    columns[f"{name}/tokens"] = np.array([e.token for e in entries], np.uint32)
    columns[f"{name}/logprobs"] = np.array([e.logprob for e in entries], np.float64)
    _put_ragged(columns, f"{name}/top/tokens", ([t for t, _ in e.top] for e in entries), np.uint32)
    _put_ragged(columns, f"{name}/top/logprobs", ([p for _, p in e.top] for e in entries), np.float64)


def _get_logprobs(columns: Mapping[str, np.ndarray], name: str) -> list[list[TokenLogprob]]:
    tokens, values = columns[f"{name}/tokens"].tolist(), columns[f"{name}/logprobs"].tolist()
    top_tokens = _get_ragged(columns, f"{name}/top/tokens")
    top_values = _get_ragged(columns, f"{name}/top/logprobs")
    entries = [
        TokenLogprob(token, value, tuple(zip(ids.tolist(), logprobs.tolist(), strict=True)))
        for token, value, ids, logprobs in zip(tokens, values, top_tokens, top_values, strict=True)
    ]
    return [entries[a:b] for a, b in pairwise(columns[f"{name}/offsets"].tolist())]
