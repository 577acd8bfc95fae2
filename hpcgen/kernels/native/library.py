"""The loaded C++ kernels. Tensors go in as addresses; what the C++ needs of shape and layout is checked here."""

import ctypes
import logging
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_double, c_float, c_int32, c_int64, c_void_p, pointer
from functools import lru_cache
from pathlib import Path

import torch

from hpcgen.kernels.layouts import PANEL_COLUMNS, PANELS, PANELS_TRANSPOSED, StoredTensor
from hpcgen.kernels.native.build import BuildFailed, build
from hpcgen.kernels.native.isa import Isa, cpu_flags, usable_isas

log = logging.getLogger(__name__)

LANES = 16
"""Values that the kernels decode at once; those of one fp8 block share a scale."""

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "swiglu_oai": 3}
"""The numbers of `Activation` in gated.h."""
ROW_MULTIPLE = 32
"""Of the width of rows that are normed or rotated."""
WIDEST_HEAD = 1024

STORAGES = {PANELS: 0, PANELS_TRANSPOSED: 0, "fp8-block": 1, "mxfp4": 2}
"""The numbers of `Storage` in weights.h."""


class StoredWeights(Structure):
    """The struct of weights.h."""

    _fields_ = (
        ("data", c_void_p),
        ("scale", c_void_p),
        ("rows", c_int64),
        ("inner", c_int64),
        ("storage", c_int32),
        ("block_rows", c_int32),
        ("block_columns", c_int32),
    )


class ExpertsCall(Structure):
    """The struct of experts.cpp."""

    _fields_ = (
        ("hidden", c_void_p),
        ("hidden_stride", c_int64),
        ("top_index", c_void_p),
        ("top_weight", c_void_p),
        ("out", c_void_p),
        ("tokens", c_int64),
        ("top_k", c_int64),
        ("inner", c_int64),
        ("intermediate", c_int64),
        ("gate_up", POINTER(StoredWeights)),
        ("down", POINTER(StoredWeights)),
        ("gate_up_bias", c_void_p),
        ("down_bias", c_void_p),
        ("first", c_int64),
        ("count", c_int64),
        ("activation", c_int32),
        ("interleaved", c_int32),
        ("alpha", c_float),
        ("limit", c_float),
        ("threads", c_int32),
    )


class AttentionCall(Structure):
    """The struct of attention_call.h."""

    _fields_ = (
        ("query", c_void_p),
        ("query_rope", c_void_p),
        ("out", c_void_p),
        ("first", c_void_p),
        ("second", c_void_p),
        ("first_page_stride", c_int64),
        ("second_page_stride", c_int64),
        ("page_table", c_void_p),
        ("table_stride", c_int64),
        ("query_offsets", c_void_p),
        ("context_lengths", c_void_p),
        ("sequences", c_int64),
        ("heads", c_int64),
        ("groups", c_int64),
        ("width", c_int64),
        ("rope_width", c_int64),
        ("value_width", c_int64),
        ("window", c_int64),
        ("sinks", c_void_p),
        ("scale", c_float),
        ("threads", c_int32),
    )


class RotaryCall(Structure):
    """The struct of rows.cpp."""

    _fields_ = (
        ("query", c_void_p),
        ("key", c_void_p),
        ("value", c_void_p),
        ("row_stride", c_int64),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("epsilon", c_float),
        ("threads", c_int32),
        ("cosine", c_void_p),
        ("sine", c_void_p),
        ("key_pages", c_void_p),
        ("value_pages", c_void_p),
        ("key_page_stride", c_int64),
        ("value_page_stride", c_int64),
        ("slots", c_void_p),
        ("tokens", c_int64),
        ("heads", c_int64),
        ("groups", c_int64),
        ("width", c_int64),
        ("value_width", c_int64),
    )


class NativeLibrary:
    """The functions of one shared library, for one instruction set.

    All tensors are bf16 on the CPU unless said otherwise. Work is spread over `torch.get_num_threads()` threads.
    """

    def __init__(self, path: Path, isa: str) -> None:
        self.isa = isa
        self._library = ctypes.CDLL(str(path))
        self._declare("hpcgen_initialize", c_int32)
        weights = POINTER(StoredWeights)
        self._declare(
            "hpcgen_linear", None, *_ROWS, c_int32, POINTER(weights), POINTER(c_void_p), c_void_p, c_int64, c_int32
        )
        self._declare("hpcgen_gated_mlp", None, *_ROWS, weights, weights, weights, c_int32, c_void_p, c_int64, c_int32)
        self._declare("hpcgen_experts", None, POINTER(ExpertsCall))
        self._declare("hpcgen_attention_bf16", None, POINTER(AttentionCall))
        self._declare("hpcgen_attention_f32", None, POINTER(AttentionCall))
        self._declare("hpcgen_write_pages", None, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64, c_int64)
        self._declare("hpcgen_rms_norm", None, *_ROWS, c_void_p, c_float, c_int64, c_void_p, c_int64, c_int32)
        self._declare("hpcgen_rotate_and_write", None, POINTER(RotaryCall))
        self._declare("hpcgen_arg_max", None, *_ROWS, c_int64, c_void_p, c_int32)
        self._declare("hpcgen_peak_products", c_double, c_int64, c_int32)
        if self._library.hpcgen_initialize():
            raise BuildFailed(f"the operating system does not let this process use {isa}")

    def _declare(self, name: str, result: type | None, *arguments: type) -> None:
        function = getattr(self._library, name)
        function.restype, function.argtypes = result, arguments

    def linear(
        self, x: torch.Tensor, weights: Sequence[StoredTensor], biases: Sequence[torch.Tensor | None]
    ) -> torch.Tensor:
        """x [T, K], weights [N, K] that `takes_weights`, biases [N] -> [T, sum of N], the outputs side by side."""
        x = _rows(x)
        out = x.new_empty(len(x), sum(weight.shape[0] for weight in weights))
        count = len(weights)
        described = (POINTER(StoredWeights) * count)(*(pointer(stored_weights(weight)) for weight in weights))
        addresses = (c_void_p * count)(*map(_address, biases))
        self._library.hpcgen_linear(*_described(x), count, described, addresses, *_target(out), _threads())
        return out

    def gated_mlp(
        self, x: torch.Tensor, gate: StoredTensor, up: StoredTensor, down: StoredTensor, activation: str
    ) -> torch.Tensor:
        """down(act(gate(x)) * up(x)); x [T, D], gate and up [I, D], down [D, I] -> [T, D]."""
        x = _rows(x)
        out = x.new_empty(len(x), down.shape[0])
        weights = map(stored_weights, (gate, up, down))
        self._library.hpcgen_gated_mlp(*_described(x), *weights, ACTIVATIONS[activation], *_target(out), _threads())
        return out

    def experts(self, call: ExpertsCall) -> None:
        call.threads = _threads()
        self._library.hpcgen_experts(byref(call))

    def attention(self, call: AttentionCall, dtype: torch.dtype) -> None:
        """`dtype`, bf16 or fp32, is that of queries, KV and output."""
        call.threads = _threads()
        bf16 = dtype == torch.bfloat16
        (self._library.hpcgen_attention_bf16 if bf16 else self._library.hpcgen_attention_f32)(byref(call))

    def write_pages(self, pages: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """pages [P, 64, G, D] of any dtype, contiguous within a page; rows [T, G, D]; slots int64 [T]."""
        rows = rows if rows[:1].is_contiguous() else rows.contiguous()
        size = pages.element_size()
        self._library.hpcgen_write_pages(
            pages.data_ptr(),
            pages.stride(0) * size,
            rows.data_ptr(),
            rows.stride(0) * size,
            slots.data_ptr(),
            len(slots),
            rows.shape[1] * rows.shape[2] * size,
        )

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """x [T, D], weight [D], D a multiple of ROW_MULTIPLE -> [T, D]."""
        x = _rows(x)
        out = x.new_empty(x.shape)
        self._library.hpcgen_rms_norm(*_described(x), weight.data_ptr(), epsilon, x.shape[1], *_target(out), _threads())
        return out

    def rotate_and_write(self, call: RotaryCall) -> None:
        call.threads = _threads()
        self._library.hpcgen_rotate_and_write(byref(call))

    def arg_max(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, V] -> int64 [T], the first of the largest values of each row; a NaN counts as largest."""
        x = _rows(x)
        out = torch.empty(len(x), dtype=torch.int64)
        self._library.hpcgen_arg_max(*_described(x), x.shape[1], out.data_ptr(), _threads())
        return out

    def peak_products(self, repeats: int) -> float:
        """Floating-point operations done in `repeats` rounds of products in registers on every thread."""
        return self._library.hpcgen_peak_products(repeats, _threads())


def takes_weights(weight: StoredTensor, transposed: bool = False) -> bool:
    """Whether the kernels read `weight` [N, K] or [E, N, K] (`transposed`: [E, K, N]) as it is stored."""
    if weight.data.device.type != "cpu" or any(size % PANEL_COLUMNS for size in weight.shape[-2:]):
        return False
    if transposed:
        return weight.layout in (PANELS_TRANSPOSED, "mxfp4")
    if weight.layout == "fp8-block":
        assert weight.scale is not None and weight.block is not None
        return weight.scale.dtype == torch.float32 and weight.block[1] % LANES == 0
    return weight.layout == PANELS


def stored_weights(weight: StoredTensor, transposed: bool = False) -> StoredWeights:
    """What the C++ is told of a weight that `takes_weights`; valid as long as the weight is."""
    assert weight.data.is_contiguous() and (weight.scale is None or weight.scale.is_contiguous())
    rows, inner = reversed(weight.shape[-2:]) if transposed else weight.shape[-2:]
    block_rows, block_columns = weight.block or (1, 1)
    return StoredWeights(
        _address(weight.data), _address(weight.scale), rows, inner, STORAGES[weight.layout], block_rows, block_columns
    )


_ROWS = (c_void_p, c_int64, c_int64)
"""Address, row stride and number of rows."""


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x [T, K] with contiguous rows."""
    return x if x.stride(1) == 1 else x.contiguous()


def _described(x: torch.Tensor) -> tuple[int, int, int]:
    return x.data_ptr(), x.stride(0), len(x)


def _target(out: torch.Tensor) -> tuple[int, int]:
    return out.data_ptr(), out.stride(0)


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _threads() -> int:
    return torch.get_num_threads()


@lru_cache(maxsize=1)
def native_library() -> NativeLibrary | None:
    """The kernels for this machine, or None and one note of why torch computes instead."""
    failures: list[str] = []
    for isa in usable_isas(cpu_flags()):
        library = _load(isa, failures)
        if library is not None:
            return library
    if failures:
        log.warning("The fast CPU kernels cannot be built, torch computes instead (slower). %s", "; ".join(failures))
    return None


def _load(isa: Isa, failures: list[str]) -> NativeLibrary | None:
    try:
        return NativeLibrary(build(isa), isa.name)
    except (BuildFailed, OSError) as error:
        failures.append(f"{isa.name}: {error}")
        return None
