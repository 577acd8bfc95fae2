"""The one place that chooses which backend computes what."""

import torch

from hpcgen.errors import HpcgenError
from hpcgen.kernels.attention.interface import AttentionBackend
from hpcgen.kernels.attention.native import NativeAttention
from hpcgen.kernels.attention.torch_reference import TorchAttention
from hpcgen.kernels.experts.interface import ExpertsBackend
from hpcgen.kernels.experts.native import NativeExperts
from hpcgen.kernels.experts.torch_reference import TorchExperts
from hpcgen.kernels.native.library import NativeLibrary, native_library


class UnknownBackend(HpcgenError):
    """A backend was asked for by a name that does not exist, or that cannot run here."""


def select_attention(device: torch.device, dtype: torch.dtype, name: str | None = None) -> AttentionBackend:
    """The fastest attention that runs on `device` in `dtype`, or the one called `name` ('native', 'torch')."""
    library = _library(device, name) if dtype in (torch.bfloat16, torch.float32) else None
    if name in (None, "native") and library is not None:
        return NativeAttention(library)
    if name in (None, "torch"):
        return TorchAttention()
    raise UnknownBackend(f"Attention backend '{name}' is not one of native, torch, or cannot run here.")


def select_experts(device: torch.device, dtype: torch.dtype, name: str | None = None) -> ExpertsBackend:
    """The fastest experts that run on `device` in `dtype`, or the ones called `name` ('native', 'torch')."""
    library = _library(device, name)
    if name in (None, "native") and library is not None:
        return NativeExperts(library)
    if name in (None, "torch"):
        return TorchExperts()
    raise UnknownBackend(f"Experts backend '{name}' is not one of native, torch, or cannot run here.")


def _library(device: torch.device, name: str | None) -> NativeLibrary | None:
    return native_library() if device.type == "cpu" and name in (None, "native") else None
