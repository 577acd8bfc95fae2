"""The one place that chooses which backend computes what."""

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import TypeVar

import torch

from hpcgen.errors import HpcgenError
from hpcgen.kernels.attention.flashinfer import FlashInferAttention
from hpcgen.kernels.attention.interface import AttentionBackend
from hpcgen.kernels.attention.native import NativeAttention
from hpcgen.kernels.attention.torch_reference import TorchAttention
from hpcgen.kernels.experts.grouped import GroupedExperts
from hpcgen.kernels.experts.interface import ExpertsBackend
from hpcgen.kernels.experts.native import NativeExperts
from hpcgen.kernels.experts.torch_reference import TorchExperts
from hpcgen.kernels.native.library import NativeLibrary, native_library

Backend = TypeVar("Backend")


class UnknownBackend(HpcgenError):
    """A backend was asked for by a name that does not exist, or that cannot run here."""


def select_attention(device: torch.device, dtype: torch.dtype, name: str | None = None) -> AttentionBackend:
    """The fastest attention that runs on `device` in `dtype`, or the one called `name`.

    Raises UnknownBackend where `name` is none of 'native', 'flashinfer', 'torch', or cannot run here.
    """
    if name in (None, "native") and (library := _native(device, dtype)):
        return NativeAttention(library)
    if name in (None, "flashinfer") and (flashinfer := _flashinfer(device, dtype)):
        return FlashInferAttention(flashinfer, device)
    return _by_torch("attention", name, TorchAttention)


def select_experts(device: torch.device, dtype: torch.dtype, name: str | None = None) -> ExpertsBackend:
    """The fastest experts that run on `device` in `dtype`, or the ones called `name`.

    Raises UnknownBackend where `name` is none of 'native', 'grouped', 'torch', or cannot run here.
    """
    if name in (None, "native") and (library := _native(device, dtype)):
        return NativeExperts(library)
    if name == "grouped" or (name is None and device.type == "cuda"):
        return GroupedExperts()
    return _by_torch("experts", name, TorchExperts)


def packs_weights(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether weights for `device` are better stored as `layouts.choose_layout` says than plain."""
    return dtype == torch.bfloat16 and _native(device, dtype) is not None


def _native(device: torch.device, dtype: torch.dtype) -> NativeLibrary | None:
    takes = device.type == "cpu" and dtype in (torch.bfloat16, torch.float32)
    return native_library() if takes else None


def _flashinfer(device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    try:
        return import_module("flashinfer")
    except ImportError:
        return None


def _by_torch(what: str, name: str | None, make: Callable[[], Backend]) -> Backend:
    if name in (None, "torch"):
        return make()
    raise UnknownBackend(
        f"The {what} backend '{name}' does not exist or cannot run here: it may not fit the device or the dtype, or "
        "its package or compiler is missing. Leave the choice to hpcgen, or take 'torch', which runs everywhere."
    )
