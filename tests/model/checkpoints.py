"""Checkpoints as they are published: quantised ones made from tiny models."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from .tiny_models import save_tiny

WEIGHTS = "model.safetensors"


def read_weights(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, single or sharded."""
    tensors: dict[str, torch.Tensor] = {}
    for file in directory.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def edit_weights(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, directory / WEIGHTS, {"format": "pt"})


def edit_config(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def save_fp8(name: str, directory: Path, block: tuple[int, int] | None) -> dict[str, torch.Tensor]:
    """A tiny model in block-wise fp8, as DeepSeek publishes: gives the tensors of the unquantised one."""
    save_tiny(name, directory, torch.bfloat16)
    plain = read_weights(directory)
    quantized: dict[str, torch.Tensor] = {}
    for key, tensor in plain.items():
        if key.endswith("_proj.weight") or "kv_a_proj" in key:
            quantized[key], scale = quantize_fp8(tensor, block or tuple(tensor.shape))
            quantized[f"{key}_scale_inv"] = scale if block else scale.reshape(())
        else:
            quantized[key] = tensor
    edit_weights(directory, quantized)
    scheme = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": block}
    edit_config(directory, quantization_config=scheme)
    return plain


def quantize_fp8(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """[R, C] -> float8 [R, C] and fp32 scales, one for each block; the last blocks may be partial."""
    rows, columns = weight.shape
    scale = torch.empty(-(-rows // block[0]), -(-columns // block[1]))
    quantized = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            scale[i, j] = weight[part].float().abs().max() / 448
            quantized[part] = (weight[part].float() / scale[i, j]).to(torch.float8_e4m3fn)
    return quantized, scale


def dequantize_fp8(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The definition: element (r, c) times the scale of block (r // rows, c // columns); fp32."""
    rows = torch.arange(weight.shape[0]) // block[0]
    columns = torch.arange(weight.shape[1]) // block[1]
    return weight.float() * scale[rows[:, None], columns]


def save_mxfp4(directory: Path) -> None:
    """A tiny GPT-OSS with random MXFP4 experts, as OpenAI publishes."""
    save_tiny("gpt_oss", directory, torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for key, tensor in read_weights(directory).items():
        if not key.endswith(("gate_up_proj", "down_proj")):
            tensors[key] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        shape = (experts, outputs, inputs // 32)
        tensors[f"{key}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
        tensors[f"{key}_scales"] = torch.randint(118, 124, shape, dtype=torch.uint8, generator=generator)
    edit_weights(directory, tensors)
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    edit_config(directory, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": skipped})
