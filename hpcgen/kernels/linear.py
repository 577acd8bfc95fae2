"""Dense layers over stored weights: the C++ kernels where they take the layout, torch otherwise."""

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from hpcgen.kernels.dequantize import dequantize
from hpcgen.kernels.layouts import StoredTensor
from hpcgen.kernels.native.library import NativeLibrary, native_library, takes_weights

_TILE_ROWS = 4
"""CPU libraries multiply rows in tiles of so many in fp32, and the rest on other ways whose sums round differently."""


def plain_linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """input [..., K] times a plain weight [N, K] -> [..., N].

    In fp32 on a CPU a row's result does not depend on the rows beside it: a sequence that goes on in another batch,
    after an interruption say, gets the same logits to the last bit, and draws the same tokens.
    """
    rows = input.shape[:-1].numel()
    missing = -rows % _TILE_ROWS
    if not missing or not rows or input.dtype != torch.float32 or input.device.type != "cpu":
        return functional.linear(input, weight, bias)
    padded = functional.pad(input.reshape(rows, -1), (0, 0, 0, missing))
    return functional.linear(padded, weight, bias)[:rows].view(*input.shape[:-1], -1)


def linear(input: torch.Tensor, weight: StoredTensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """input [..., K], weight [N, K] -> [..., N], in the dtype of `input`; accumulates in fp32."""
    return linears(input, (weight,), (bias,))


def linears(
    input: torch.Tensor, weights: Sequence[StoredTensor], biases: Sequence[torch.Tensor | None]
) -> torch.Tensor:
    """input [..., K] times several weights [N, K], with their biases [N] -> [..., sum of N], side by side."""
    library = _library_for(input, *weights)
    if library is None:
        plain = (dequantize(weight, input.dtype) for weight in weights)
        outputs = [plain_linear(input, weight, bias) for weight, bias in zip(plain, biases, strict=True)]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
    biases = [None if bias is None else bias.to(input.dtype).contiguous() for bias in biases]
    return library.linear(input.flatten(0, -2), weights, biases).unflatten(0, input.shape[:-1])


def gated_mlp(
    input: torch.Tensor, gate: StoredTensor, up: StoredTensor, down: StoredTensor, activation: str
) -> torch.Tensor:
    """down(act(gate(input)) * up(input)), input [..., D] -> [..., D]; `activation` 'silu', 'gelu' or 'gelu_tanh'.

    Fused, the intermediate never leaves the cache in fp32: it is rounded to the dtype of `input` once.
    """
    library = _library_for(input, gate, up, down)
    if library is None:
        hidden = _ACTIVATIONS[activation](linear(input, gate)) * linear(input, up)
        return linear(hidden, down)
    return library.gated_mlp(input.flatten(0, -2), gate, up, down, activation).view(input.shape)


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


def _library_for(input: torch.Tensor, *weights: StoredTensor) -> NativeLibrary | None:
    """The C++ kernels where they compute `input` with these weights."""
    takes = input.dtype == torch.bfloat16 and input.device.type == "cpu" and input.dim() > 1
    return native_library() if takes and all(map(takes_weights, weights)) else None
