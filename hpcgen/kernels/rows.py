"""Norms, and the choice of the largest, row by row: the C++ kernels where they take the tensors, torch otherwise."""

import torch

from hpcgen.kernels.native.library import ROW_MULTIPLE, native_library


def norms_rows(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `rms_norm` takes x [..., D] with weight [D]."""
    return (
        x.dtype == weight.dtype == torch.bfloat16
        and x.device.type == "cpu"
        and x.shape[-1] % ROW_MULTIPLE == 0
        and native_library() is not None
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """weight * x / rms(x), rounded before and after the weight as transformers' LlamaRMSNorm does; see `norms_rows`."""
    library = native_library()
    assert library is not None
    return library.rms_norm(x.flatten(0, -2), weight, epsilon).view(x.shape)


def arg_max(logits: torch.Tensor) -> torch.Tensor:
    """[R, V] -> int64 [R], the first of the largest values of each row."""
    if logits.dtype == torch.bfloat16 and logits.device.type == "cpu" and (library := native_library()):
        return library.arg_max(logits)
    return logits.argmax(dim=-1)
