"""The transformers definition on the meta device, as the converter needs it: names, shapes, dtypes and renamings.

`transformers.core_model_loading` and `conversion_mapping` are internal to transformers. They are used because they are
the only complete account of how checkpoints of all families map to its definitions; the pinned minor version and
tests/model/test_conversion*.py keep this honest.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, build_glob_alternation, rename_source_key

from hpcgen.model.architecture import definition_of, read_config
from hpcgen.model.family import Family, family_of, layer_count
from hpcgen.model.units import aliases_of, units_of


@dataclass(frozen=True)
class Target:
    """A parameter or persistent buffer of the model."""

    name: str
    unit: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Definition:
    """What a model directory's configuration makes of the transformers definition, for a target dtype.

    Raises:
        ModelError: no or a wrong config.json, or an architecture that is not supported.
    """

    def __init__(self, directory: Path, dtype: torch.dtype | None):
        """`dtype` None takes the configuration's, and bfloat16 if it has none."""
        model_type, config = read_config(directory)
        self.dtype = target_dtype(config, dtype)
        with torch.device("meta"):
            self.model: PreTrainedModel = definition_of(model_type, config)._from_config(config, dtype=self.dtype)
        self.family: Family = family_of(model_type, self.model)
        self.aliases = aliases_of(self.model)
        self._state = self.model.state_dict()
        transforms = get_model_conversion_mapping(self.model)
        self._renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        self._converters = [t for t in transforms if isinstance(t, WeightConverter)]
        self._by_pattern = {pattern: c for c in self._converters for pattern in c.source_patterns}

    def targets(self) -> list[Target]:
        """In the order of a forward pass."""
        units = units_of(self.model, self.family, layer_count(self.model.config))
        dtypes = self._dtypes()
        return [
            Target(name, unit, tuple(self._state[name].shape), dtypes[name])
            for unit, names in units.items()
            for name in names
        ]

    def rename(self, key: str) -> tuple[str, str | None]:
        """(name in the model, pattern of the converter that makes it from several tensors, or None)."""
        prefix = self.model.base_model_prefix
        name, pattern = rename_source_key(key, self._renamings, self._converters, prefix, self._state)
        if name not in self._state and key in self._state:
            return rename_source_key(key, [], [], prefix, self._state)
        return name, pattern

    def converter(self, pattern: str) -> WeightConverter:
        return self._by_pattern[pattern]

    def is_ignorable(self, key: str) -> bool:
        """Whether a checkpoint may have `key` though the model has no such parameter."""
        patterns = [
            r"rotary_emb\.inv_freq$",
            r"(^|\.)position_ids$",
            *(self.model._keys_to_ignore_on_load_unexpected or []),
        ]
        if any(re.search(pattern, key) for pattern in patterns):
            return True
        # Layers past the last are for multi-token prediction (DeepSeek-V3 §2.2), which plain decoding does not use.
        layer = re.match(re.escape(self.family.layers) + r"\.(\d+)\.", key)
        first = layer_count(self.model.config)
        extra = getattr(self.model.config, "num_nextn_predict_layers", None) or 0
        return layer is not None and first <= int(layer[1]) < first + extra

    def _dtypes(self) -> Mapping[str, torch.dtype]:
        """As `from_pretrained(dtype=...)` would have them: some parameters stay in fp32."""
        plan = self.model._get_dtype_plan(self.dtype)
        if not plan:
            return {name: tensor.dtype for name, tensor in self._state.items()}
        alternation, pattern_of, _ = build_glob_alternation(list(plan))
        dtypes = {}
        for name, tensor in self._state.items():
            match = alternation.search(name)
            dtypes[name] = plan[pattern_of[match.lastgroup]] if match and match.lastgroup else tensor.dtype
        return dtypes


def target_dtype(config: PreTrainedConfig, dtype: torch.dtype | None) -> torch.dtype:
    """What weights are converted to: `dtype`, or the configuration's, or bfloat16."""
    named = config.dtype if dtype is None else dtype
    if isinstance(named, str):
        named = getattr(torch, named.removeprefix("torch."), None)
    return named if named in (torch.bfloat16, torch.float16, torch.float32) else torch.bfloat16
