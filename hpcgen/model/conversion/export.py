"""From the weight file back to a checkpoint with the names that its family is published under."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers.core_model_loading import revert_weight_conversion

from hpcgen.kernels.layouts import StoredTensor, unpack
from hpcgen.model.conversion.checkpoint import INDEX_FILE
from hpcgen.model.conversion.definition import Definition
from hpcgen.model.quantization import FP8_SCALE, MXFP4_BLOCKS, MXFP4_SCALES, coarsen_scale, quantization_of, scale_shape
from hpcgen.model.weight_file import WeightFile


def export_safetensors(weight_file: WeightFile, directory: str | os.PathLike) -> Path:
    """Writes config.json, one safetensors file for each unit, and their index; returns the directory.

    Quantised weights stay quantised, packed ones are unpacked. Memory is bounded by about twice the largest unit.
    The tokenizer's files are not in the weight file: copy them.

    Raises:
        ModelError: the weight file's configuration is not one that this hpcgen can convert.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(weight_file.model_config, indent=2))
    definition = Definition(directory, getattr(torch, weight_file.header.dtype))
    weight_map: dict[str, str] = {}
    total = 0
    for number, (unit, names) in enumerate(weight_file.units.items(), start=1):
        file = f"model-{number:05}-of-{len(weight_file.units):05}.safetensors"
        tensors = dict(_published(weight_file, definition, names))
        save_file(tensors, directory / file, metadata={"format": "pt", "unit": unit})
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2))
    return directory


def _published(
    weight_file: WeightFile, definition: Definition, names: tuple[str, ...]
) -> Iterator[tuple[str, torch.Tensor]]:
    plain: dict[str, torch.Tensor] = {}
    for name in names:
        stored = weight_file.get(name)
        if stored.layout == "mxfp4":
            assert stored.scale is not None
            yield name + MXFP4_BLOCKS, stored.data
            yield name + MXFP4_SCALES, stored.scale
        elif stored.layout == "fp8-block":
            yield from _published_fp8(weight_file, definition, name, stored)
        else:
            plain[name] = unpack(stored)
    for key, tensor in revert_weight_conversion(definition.model, plain).items():
        yield key, tensor.contiguous().clone()  # parts of one tensor may not share memory in a safetensors file


def _published_fp8(
    weight_file: WeightFile, definition: Definition, name: str, stored: StoredTensor
) -> Iterator[tuple[str, torch.Tensor]]:
    assert stored.scale is not None and stored.block is not None
    quantization = quantization_of(weight_file.model_config)
    weights = revert_weight_conversion(definition.model, {name: stored.data.view(torch.uint8)})
    scales = revert_weight_conversion(definition.model, {name: stored.scale})
    for key, weight in weights.items():
        block = quantization.block if quantization is not None else None
        yield key, weight.contiguous().clone().view(torch.float8_e4m3fn)
        # transformers before 5.24 drops dimensions of size 1.
        scale = scales[key].reshape(scale_shape(weight.shape, stored.block))
        yield key + FP8_SCALE, coarsen_scale(scale, stored.block, block)
