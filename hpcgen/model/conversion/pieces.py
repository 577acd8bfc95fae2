"""Turns a group of checkpoint tensors into weights: cast, merged and packed, with their scales alongside."""

from collections.abc import Iterator
from copy import deepcopy
from math import prod
from typing import Any, NamedTuple

import torch

from hpcgen.kernels.dequantize import dequantize
from hpcgen.kernels.layouts import StoredTensor
from hpcgen.model.conversion.checkpoint import Checkpoint
from hpcgen.model.conversion.definition import Definition
from hpcgen.model.conversion.plan import Group, Source
from hpcgen.model.quantization import Quantization, refine_scale

CHUNK_BYTES = 128 << 20
"""Experts are merged in chunks of about this size, so that memory does not grow with their number."""


class Piece(NamedTuple):
    """A weight, or some experts of it: consecutive rows of its first dimension."""

    name: str
    data: torch.Tensor
    scale: torch.Tensor | None = None


def pieces(
    group: Group, checkpoint: Checkpoint, definition: Definition, quantization: Quantization | None, dtype: torch.dtype
) -> Iterator[Piece]:
    """The weights of a group, each in order of its first dimension.

    Args:
        dtype: of the weight; quantised ones that stay so keep theirs.
    """
    if group.converter is None:
        (source,) = group.sources
        yield Piece(group.name, *_load(source, group, checkpoint, quantization, dtype))
        return
    for sources in _chunks(group):
        loaded = [_load(source, group, checkpoint, quantization, dtype) for source in sources]
        data = _run(group, definition, sources, [data for data, _ in loaded])
        if not group.keeps_quantization:
            yield from (Piece(name, tensor) for name, tensor in data.items())
            continue
        scales = _run(group, definition, sources, [scale for _, scale in loaded if scale is not None])
        yield from (Piece(name, tensor, scales[name]) for name, tensor in data.items())


def _chunks(group: Group) -> Iterator[list[Source]]:
    """The sources of some experts at a time; all at once where the converter needs that."""
    if not group.stacks_experts:
        yield group.sources
        return
    experts = list(zip(*group.by_pattern().values(), strict=True))
    of_one = sum(prod(source.data.shape) * source.data.dtype.itemsize for source in experts[0])
    step = max(1, CHUNK_BYTES // of_one)
    for start in range(0, len(experts), step):
        yield [source for expert in experts[start : start + step] for source in expert]


def _load(
    source: Source, group: Group, checkpoint: Checkpoint, quantization: Quantization | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    data = checkpoint.load(source.data)
    if source.scale is None or quantization is None:
        return data.to(dtype), None
    scale = checkpoint.load(source.scale)
    if scale.dtype == torch.float8_e8m0fnu:
        scale = scale.float()
    if quantization.layout == "mxfp4":
        return data, scale
    target = group.block if group.block is not None else quantization.block or source.data.shape[-2:]
    scale = refine_scale(scale, source.data.shape, quantization.block, (target[0], target[1]))
    if group.keeps_quantization:
        return data, scale
    stored = StoredTensor(data, source.data.shape, "fp8-block", scale, (target[0], target[1]))
    return dequantize(stored, dtype), None


def _run(
    group: Group, definition: Definition, sources: list[Source], tensors: list[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """transformers' converter, applied to the tensors of these sources."""
    assert group.converter is not None
    converter = deepcopy(group.converter)
    fp8 = tensors[0].dtype == torch.float8_e4m3fn  # which torch can hardly do anything with, so it goes as bytes
    for source, tensor in zip(sources, tensors, strict=True):
        assert source.pattern is not None
        # The annotation of the last argument says Future, but tensors are what transformers itself gives when it saves.
        given: Any = tensor.view(torch.uint8) if fp8 else tensor
        converter.add_tensor(group.name, source.data.key, source.pattern, given)
    made = converter.convert(group.name, model=definition.model, config=definition.model.config)
    whole = {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}
    return {name: tensor.view(torch.float8_e4m3fn) if fp8 else tensor for name, tensor in whole.items()}
