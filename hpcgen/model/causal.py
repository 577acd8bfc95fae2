"""A causal language model: transformers' own definition on the meta device, whose weights are bound unit by unit."""

import inspect
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hpcgen.kernels.attention.kv_layout import KVLayout
from hpcgen.kernels.experts.interface import ExpertsBackend, ExpertWeights
from hpcgen.kernels.layouts import StoredTensor
from hpcgen.model.architecture import definition_of, read_config
from hpcgen.model.attention_function import IMPLEMENTATION
from hpcgen.model.binding import BoundUnit, UnitBinder
from hpcgen.model.errors import ModelError
from hpcgen.model.experts import ExpertsLayer, attach, is_experts_module
from hpcgen.model.family import Family, family_of, layer_count
from hpcgen.model.forward_context import ForwardContext, PagedCache
from hpcgen.model.grouped_attention import join_inputs
from hpcgen.model.linear import read_stored_weights
from hpcgen.model.mla import absorb
from hpcgen.model.norm import norm_in_one_pass
from hpcgen.model.probe import ProbeAttention, ProbeExperts, kv_layout_found, probe_batch
from hpcgen.model.units import units_of

PROBE_TOKENS = 2
_NOTHING = StoredTensor(torch.empty(0, device="meta"), (0,))
_WITHOUT_DATA = ExpertWeights(_NOTHING, _NOTHING, None, None, False, False, "silu")


class CausalModel:
    """A model that runs packed, ragged batches over paged KV.

    Attributes: `config`; `module`, transformers' ForCausalLM; `family`; `kv_layout`; `units`, the names of the
    parameters by unit; `layers`, how many; `experts`, the `ExpertsLayer` of each sparse layer by its index;
    `experts_backend`, the one that all of them compute with, which may be exchanged between forwards;
    `latent_attention`, whether KV is the latent of MLA; `dtype` and `device`.
    """

    experts_backend: ExpertsBackend

    def __init__(self, module: PreTrainedModel, family: Family, dtype: torch.dtype, device: torch.device) -> None:
        """Use `build`."""
        self.module = module
        self.config: PreTrainedConfig = module.config
        self.family = family
        self.dtype = dtype
        self.device = device
        self.layers = layer_count(module.config)
        self.latent_attention = False
        self.experts: dict[int, ExpertsLayer] = {}
        for index in range(self.layers):
            self.latent_attention = absorb(self.attention_stage(index))
            join_inputs(self.attention_stage(index))
            for child in self.experts_stage(index).modules():
                if is_experts_module(child):
                    self.experts[index] = attach(child, self, index)
        self.units = units_of(module, family, self.layers)
        self._binder = UnitBinder(module, self.units)
        read_stored_weights(module)
        norm_in_one_pass(module)
        self._embedding = module.get_submodule(family.embedding)
        # Its name in transformers 5.20, the last for Python 3.10, is `past_key_values`.
        parameters = inspect.signature(module.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self.kv_layout: KVLayout = self._probe()
        for unit in self.units:
            self._binder.unbind(unit)

    @classmethod
    def build(
        cls, directory: Path, dtype: torch.dtype, device: torch.device, experts_backend: ExpertsBackend | None = None
    ) -> "CausalModel":
        """The model that `directory/config.json` describes, without weights.

        Raises ModelError, before any work, for a directory that is not one of a model and for an architecture that
        cannot run on paged KV, with the reason.
        """
        model_type, config = read_config(directory)
        return cls.from_config(model_type, config, dtype, device, experts_backend)

    @classmethod
    def from_config(
        cls,
        model_type: str,
        config: PreTrainedConfig,
        dtype: torch.dtype,
        device: torch.device,
        experts_backend: ExpertsBackend | None = None,
    ) -> "CausalModel":
        """As `build`, from a configuration at hand. `experts_backend` is needed before a sparse model's forward."""
        definition = definition_of(model_type, config)
        for output in ("output_router_logits", "output_attentions", "output_hidden_states"):
            if getattr(config, output, False):
                setattr(config, output, False)
        if getattr(config, "quantization_config", None) is not None:
            del config.quantization_config
        try:
            with torch.device("meta"):
                module = definition._from_config(
                    config, dtype=dtype, attn_implementation=IMPLEMENTATION, experts_implementation=IMPLEMENTATION
                )
            module.eval()
            module.requires_grad_(False)
            _materialize_computed_buffers(module, device)
            model = cls(module, family_of(model_type, module), dtype, device)
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(
                f"Model type '{model_type}' is not supported: its definition cannot be built from this configuration "
                f"with attention over paged keys and values ({type(error).__name__}: {error})."
            ) from error
        if experts_backend is not None:
            model.experts_backend = experts_backend
        return model

    @property
    def vocabulary(self) -> int:
        """Columns of the logits."""
        return self.config.vocab_size

    def layer(self, index: int) -> nn.Module:
        """A decoder layer."""
        return self.family.layer(self.module, index)

    def attention_stage(self, index: int) -> nn.Module:
        return self.layer(index).get_submodule(self.family.attention)

    def experts_stage(self, index: int) -> nn.Module:
        """The yield point of a layer: its MoE block, or its MLP where it is dense."""
        return self.layer(index).get_submodule(self.family.experts)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Shape that the definition gives a parameter."""
        return self._binder.shapes[name]

    def prepare(
        self,
        unit: str,
        tensors: Mapping[str, StoredTensor],
        first_expert: int = 0,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> BoundUnit:
        """Weights of a unit at one place in memory, for `BoundUnit.apply`; see `UnitBinder.prepare`."""
        return self._binder.prepare(unit, tensors, first_expert, shapes)

    def bind(self, unit: str, tensors: Mapping[str, StoredTensor], first_expert: int = 0) -> None:
        """`prepare` and `apply` at once."""
        self.prepare(unit, tensors, first_expert).apply()

    def unbind(self, unit: str) -> None:
        """Takes the weights of a unit away: a forward that uses it raises."""
        self._binder.unbind(unit)

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Token ids int64 [T] -> hidden [T, D], as the definition's embedding module gives it."""
        return self._embedding(ids_T[None])[0]

    def forward(
        self, hidden_TD: torch.Tensor, context: ForwardContext, logit_rows: torch.Tensor | None
    ) -> torch.Tensor:
        """hidden_TD [T, D] of the batch in `context` -> logits [R, V] of the rows of T in `logit_rows` [R] int64.

        Where no row is wanted (None or empty) the head does not run, and need not be bound.
        """
        arguments = {
            "inputs_embeds": hidden_TD[None],
            "position_ids": context.batch.positions[None],
            self._cache_argument: PagedCache(context),
            "use_cache": True,
            "forward_context": context,
        }
        if logit_rows is None or not len(logit_rows):
            self.module.base_model(**arguments)
            return hidden_TD.new_empty(0, self.vocabulary)
        return self.module(logits_to_keep=logit_rows, **arguments).logits[0]

    def _probe(self) -> KVLayout:
        """Runs one forward on the meta device, and gives the KV layout it shows."""
        if "logits_to_keep" not in inspect.signature(self.module.forward).parameters:
            raise ModelError(f"{type(self.module).__name__} is not supported: it cannot give logits of some rows only.")
        probe = ProbeAttention()
        self.experts_backend = ProbeExperts()
        for layer in self.experts.values():
            layer.weights = _WITHOUT_DATA
        context = ForwardContext(probe_batch(PROBE_TOKENS), probe, probe.kv)
        hidden = torch.empty(PROBE_TOKENS, self.config.hidden_size, dtype=self.dtype, device="meta")
        rows = torch.zeros(1, dtype=torch.int64, device="meta")
        try:
            with torch.inference_mode():
                self.forward(hidden, context, rows)
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(
                f"{type(self.module).__name__} is not supported: it does not run over paged keys and values ({error})."
            ) from error
        finally:
            del self.experts_backend
            for layer in self.experts.values():
                layer.weights = None
        return kv_layout_found(self.module, probe, self.layers, self.dtype)


def _materialize_computed_buffers(module: PreTrainedModel, device: torch.device) -> None:
    """Gives buffers that are computed and not stored (rotary frequencies) their values on `device`.

    `_init_weights` is what transformers computes them with at load; it leaves parameters on meta as they are. Raises
    ModelError for a buffer that it does not compute.
    """
    with torch.no_grad():
        for path, submodule in module.named_modules():
            computed = {
                name: torch.full_like(buffer, torch.nan if buffer.is_floating_point() else 0, device=device)
                for name, buffer in submodule._buffers.items()
                if buffer is not None and name in submodule._non_persistent_buffers_set
            }
            if not computed:
                continue
            submodule._buffers.update(computed)
            module._init_weights(submodule)
            for name, buffer in submodule._buffers.items():
                if name in computed and buffer is not None and buffer.isnan().any():
                    raise ModelError(
                        f"{type(module).__name__} is not supported: transformers does not say how to compute its "
                        f"buffer '{path}.{name}'."
                    )
