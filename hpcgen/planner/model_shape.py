"""The dimensions of a model that decide its costs, read from its config.json. Numbers only: no torch, no weights."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpcgen.planner.errors import PlanError

_BYTES = {"bfloat16": 2.0, "float16": 2.0, "float32": 4.0}


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One attention layer. Parameters are counts, not bytes."""

    parameters: int
    kv_elements: int
    """Elements of KV that a token keeps in one layer: K and V of all heads, or the latent of MLA and its rotary key."""
    decode_flops: int
    """Operations of one query token on one token of context, in decode (MLA: absorbed)."""
    prefill_flops: int
    """The same in prefill (MLA: decompressed)."""
    query_width: int
    """Elements of the queries of one token, all heads."""
    window: int | None = None
    """Most tokens of context that sliding-window layers attend to."""
    windowed_share: float = 0.0
    """Share of the layers that have the window."""

    @property
    def is_latent(self) -> bool:
        """Whether it is MLA, whose KV is one latent for all heads."""
        return self.decode_flops != self.prefill_flops

    def context(self, tokens: float) -> float:
        """Tokens that a query with `tokens` before it attends to, as the mean over layers."""
        if self.window is None:
            return tokens
        return (1 - self.windowed_share) * tokens + self.windowed_share * min(tokens, self.window)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder: `dense_layers` with one MLP and `moe_layers` with experts. Sizes in elements unless they say bytes."""

    name: str
    layers: int
    hidden: int
    vocabulary: int
    attention: AttentionShape
    dense_layers: int
    dense_parameters: int
    """Of the MLP of a dense layer."""
    experts: int = 0
    experts_per_token: int = 0
    expert_parameters: int = 0
    """Of one routed expert."""
    shared_parameters: int = 0
    """Of the shared experts and the router of one layer."""
    weight_bytes: float = 2.0
    """Bytes of a parameter of a linear layer."""
    expert_bytes: float = 2.0
    """Bytes of a parameter of an expert."""
    kv_bytes: float = 2.0
    """Bytes of an element of KV."""
    compute_dtype: str = "bfloat16"
    """Type that the matrix units multiply in."""
    tied_embedding: bool = False

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers

    @property
    def kv_token_bytes(self) -> float:
        """Bytes of KV of one token, all layers."""
        return self.layers * self.attention.kv_elements * self.kv_bytes

    @property
    def attention_bytes(self) -> float:
        """Bytes of the attention parameters of one layer."""
        return self.attention.parameters * self.weight_bytes

    @property
    def experts_bytes(self) -> float:
        """Bytes of all routed experts of one layer."""
        return self.experts * self.expert_parameters * self.expert_bytes

    @property
    def head_bytes(self) -> float:
        """Bytes of the output head; kept in 16 bits where linear layers are quantised."""
        return self.vocabulary * self.hidden * max(self.weight_bytes, 2.0)

    @property
    def replicated_bytes(self) -> float:
        """Bytes of everything but routed experts: what each rank needs in decode with expert parallelism."""
        shared = self.dense_layers * self.dense_parameters + self.moe_layers * self.shared_parameters
        embeddings = self.head_bytes * (1 if self.tied_embedding else 2)
        return self.layers * self.attention_bytes + shared * self.weight_bytes + embeddings

    @property
    def total_bytes(self) -> float:
        return self.replicated_bytes + self.moe_layers * self.experts_bytes

    @property
    def parameters(self) -> int:
        """All of them."""
        embeddings = self.vocabulary * self.hidden * (1 if self.tied_embedding else 2)
        moe = self.moe_layers * (self.experts * self.expert_parameters + self.shared_parameters)
        return embeddings + self.layers * self.attention.parameters + self.dense_layers * self.dense_parameters + moe

    @property
    def active_parameters(self) -> int:
        """Those that one token is multiplied with, the head included."""
        moe = self.moe_layers * (self.experts_per_token * self.expert_parameters + self.shared_parameters)
        dense = self.dense_layers * self.dense_parameters
        return self.vocabulary * self.hidden + self.layers * self.attention.parameters + dense + moe

    def named(self, name: str) -> ModelShape:
        return replace(self, name=name)

    @classmethod
    def of(cls, fields: dict[str, Any]) -> ModelShape:
        """From what `dataclasses.asdict` made of it. Raises PlanError."""
        try:
            return cls(**{**fields, "attention": AttentionShape(**fields["attention"])})
        except (KeyError, TypeError) as error:
            raise PlanError(f"this is no description of a model: {error}") from None

    @classmethod
    def read(cls, path: Path) -> ModelShape:
        """From a model directory, or from a config.json itself. Raises PlanError."""
        file = path / "config.json" if path.is_dir() else path
        try:
            config = json.loads(file.read_text())
        except OSError as error:
            raise PlanError(
                f"{file} cannot be read ({error.strerror}): give a model directory with config.json"
            ) from None
        except ValueError as error:
            raise PlanError(f"{file} is not JSON: {error}") from None
        try:
            return cls.from_config(config, path.name if path.is_dir() else path.stem)
        except (KeyError, TypeError) as error:
            raise PlanError(f"{file} does not describe a causal language model that can be planned: {error}") from None

    @classmethod
    def from_config(cls, config: dict[str, Any], name: str) -> ModelShape:
        """From the keys of a Hugging Face configuration. Raises KeyError for one that is missing."""
        config = config.get("text_config", config)
        layers, hidden = config["num_hidden_layers"], config["hidden_size"]
        experts = _first(config, "num_experts", "n_routed_experts", "num_local_experts") or 0
        width = (config.get("moe_intermediate_size") if experts else None) or config["intermediate_size"]
        weight_bytes, expert_bytes, compute = _precision(config)
        shared = (config.get("n_shared_experts") or 0) * 3 * hidden * width
        return cls(
            name=name,
            layers=layers,
            hidden=hidden,
            vocabulary=config["vocab_size"],
            attention=_mla(config) if config.get("kv_lora_rank") else _grouped_query(config),
            dense_layers=_dense_layers(config, layers) if experts else layers,
            dense_parameters=3 * hidden * config["intermediate_size"],
            experts=experts,
            experts_per_token=config.get("num_experts_per_tok") or 0,
            expert_parameters=3 * hidden * width if experts else 0,
            shared_parameters=shared + experts * hidden,
            weight_bytes=weight_bytes,
            expert_bytes=expert_bytes,
            kv_bytes=min(_BYTES.get(_dtype(config), 2.0), 4.0),
            compute_dtype=compute,
            tied_embedding=bool(config.get("tie_word_embeddings", False)),
        )


def _first(config: dict[str, Any], *keys: str) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), None)


def _dtype(config: dict[str, Any]) -> str:
    return str(_first(config, "dtype", "torch_dtype") or "bfloat16")


def _precision(config: dict[str, Any]) -> tuple[float, float, str]:
    """(bytes of a weight, bytes of an expert's weight, type of the multiplications)."""
    method = (config.get("quantization_config") or {}).get("quant_method")
    if method == "fp8":
        return 1.0, 1.0, "float8"
    plain = _BYTES.get(_dtype(config), 2.0)
    if method == "mxfp4":
        return plain, 0.5 + 1 / 32, "bfloat16"  # a shared 8-bit exponent for 32 values. OCP MX specification 1.0
    return plain, plain, _dtype(config) if _dtype(config) in _BYTES else "bfloat16"


def _dense_layers(config: dict[str, Any], layers: int) -> int:
    """Layers of a mixture-of-experts model that have a plain MLP."""
    if config.get("first_k_dense_replace"):
        return min(config["first_k_dense_replace"], layers)
    only = len(config.get("mlp_only_layers") or [])
    step = config.get("decoder_sparse_step") or 1
    return max(only, layers - layers // step)


def _grouped_query(config: dict[str, Any]) -> AttentionShape:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head = config.get("head_dim") or hidden // heads
    kinds = config.get("layer_types") or []
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    share = kinds.count("sliding_attention") / len(kinds) if kinds else 1.0
    return AttentionShape(
        parameters=hidden * head * (2 * heads + 2 * kv_heads),
        kv_elements=2 * kv_heads * head,
        decode_flops=4 * heads * head,
        prefill_flops=4 * heads * head,
        query_width=heads * head,
        window=window,
        windowed_share=share if window else 0.0,
    )


def _mla(config: dict[str, Any]) -> AttentionShape:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    latent, rotary = config["kv_lora_rank"], config["qk_rope_head_dim"]
    plain, value, queries = config["qk_nope_head_dim"], config["v_head_dim"], config.get("q_lora_rank")
    query = heads * (plain + rotary)
    parameters = (hidden * queries + queries * query) if queries else hidden * query
    parameters += hidden * (latent + rotary) + latent * heads * (plain + value) + heads * value * hidden
    return AttentionShape(
        parameters=parameters,
        kv_elements=latent + rotary,
        decode_flops=2 * heads * (2 * latent + rotary),
        prefill_flops=2 * heads * (plain + rotary + value),
        query_width=query,
    )
