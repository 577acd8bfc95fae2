"""What becomes of each tensor of a checkpoint, decided from the headers alone, before a weight is read."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod

import torch
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, dot_natural_key

from hpcgen.model.conversion.checkpoint import Checkpoint, SourceTensor
from hpcgen.model.conversion.definition import Definition, Target
from hpcgen.model.conversion.layout_choice import LayoutOf
from hpcgen.model.errors import ModelError
from hpcgen.model.quantization import (
    Quantization,
    common_block,
    data_entry_key,
    is_companion,
    parameter_key,
    scale_entry_key,
    scale_key,
    scale_shape,
)
from hpcgen.model.weight_format import Entry, Record


class ConversionError(ModelError):
    """A checkpoint that does not fit its own configuration."""


@dataclass(frozen=True)
class Source:
    """A tensor of the checkpoint and, if it is quantised, its scales."""

    data: SourceTensor
    pattern: str | None
    """Which source pattern of the converter it matched."""
    scale: SourceTensor | None = None


@dataclass
class Group:
    """Tensors that are converted together: one that is only renamed, or all that a converter merges or splits."""

    name: str
    """The weight that they become; the first, if a converter makes several."""
    converter: WeightConverter | None
    sources: list[Source] = field(default_factory=list)
    keeps_quantization: bool = False
    block: tuple[int, int] | None = None
    """Of the merged scales."""

    @property
    def stacks_experts(self) -> bool:
        """Its sources can be taken expert by expert: each is a slice of the first dimension of the result."""
        return self.converter is not None and merges_rows(self.converter)

    def by_pattern(self) -> dict[str | None, list[Source]]:
        patterns: dict[str | None, list[Source]] = {}
        for source in self.sources:
            patterns.setdefault(source.pattern, []).append(source)
        return patterns


def merges_rows(converter: WeightConverter) -> bool:
    """Stacks experts in the first dimension, and at most concatenates the rows of gate and up before."""
    first, *others = converter.operations
    return (
        isinstance(first, MergeModulelist)
        and first.dim == 0
        and all(isinstance(operation, Concatenate) and operation.dim == 1 for operation in others)
    )


@dataclass(frozen=True)
class Plan:
    groups: list[Group]
    records: list[Record]
    """In file order, without offsets and checksums."""
    skipped: list[str]
    """Keys that the model has no use for."""


def plan_conversion(
    checkpoint: Checkpoint, definition: Definition, quantization: Quantization | None, layout_of: LayoutOf
) -> Plan:
    """Groups the checkpoint's tensors by what they become.

    Raises:
        ConversionError: tensors are missing, of the wrong shape, or unknown to the model.
    """
    targets = {target.name: target for target in definition.targets()}
    groups, unexpected, skipped = _groups(checkpoint, definition, quantization, targets)
    _resolve_tied(checkpoint, definition, groups)
    if unexpected:
        raise ConversionError(
            f"{checkpoint.directory} has {_listed(unexpected)} that {_named(definition)} does not know. "
            "Is config.json that of this checkpoint?"
        )
    made = {name: group for group in groups.values() for name in _results(group)}
    missing = [name for name in targets if name not in made]
    if missing:
        raise ConversionError(
            f"{checkpoint.directory} lacks {_listed(missing)} that {_named(definition)} needs. "
            "Is the checkpoint downloaded completely, and config.json its own?"
        )
    for group in groups.values():
        _settle_quantization(group, quantization)
        if group.name in targets:
            _check_shape(group, targets[group.name], quantization)
    records = [_record(target, made[target.name], quantization, layout_of) for target in targets.values()]
    return Plan(list(groups.values()), records, skipped)


def _groups(
    checkpoint: Checkpoint, definition: Definition, quantization: Quantization | None, targets: dict[str, Target]
) -> tuple[dict[str, Group], list[str], list[str]]:
    groups: dict[str, Group] = {}
    unexpected: list[str] = []
    skipped: list[str] = []
    keys = checkpoint.tensors
    for key in sorted(keys, key=dot_natural_key):
        if is_companion(key, quantization, keys):
            continue
        name, pattern = definition.rename(parameter_key(key, quantization))
        if name not in targets and name not in definition.aliases:
            (skipped if definition.is_ignorable(key) or definition.is_ignorable(name) else unexpected).append(key)
            continue
        group = groups.setdefault(name, Group(name, definition.converter(pattern) if pattern else None))
        scale = scale_key(key, quantization, keys)
        group.sources.append(Source(keys[key], pattern, keys[scale] if scale else None))
    return groups, unexpected, skipped


def _resolve_tied(checkpoint: Checkpoint, definition: Definition, groups: dict[str, Group]) -> None:
    """Leaves one group of those that are tied, under the name that owns the tensor."""
    for alias, owner in definition.aliases.items():
        if alias not in groups:
            continue
        tied = groups.pop(alias)
        if owner not in groups:
            tied.name = owner
            groups[owner] = tied
            continue
        ours, theirs = tied.sources[0].data, groups[owner].sources[0].data
        if ours.shape != theirs.shape or not torch.equal(checkpoint.load(ours), checkpoint.load(theirs)):
            raise ConversionError(
                f"{checkpoint.directory} has different tensors {ours.key} and {theirs.key}, but its config.json ties "
                'them: set "tie_word_embeddings" to false there.'
            )


def _results(group: Group) -> list[str]:
    """Names of all weights that the group becomes."""
    if group.converter is None:
        return [group.name]
    first, *others = group.converter.target_patterns
    return [group.name, *(group.name.replace(first, other) for other in others)]


def _settle_quantization(group: Group, quantization: Quantization | None) -> None:
    """Quantised sources stay so unless a converter does to them what scales do not follow."""
    quantized = [source for source in group.sources if source.scale is not None]
    if quantization is None or not quantized:
        return
    if len(quantized) < len(group.sources):
        odd = next(source for source in group.sources if source.scale is None)
        raise ConversionError(f"{odd.data.file}: {odd.data.key} has no scales, unlike those it is merged with.")
    if quantization.layout == "fp8-block":
        for source in group.sources:
            _check_scale(source, quantization)
    group.keeps_quantization = group.converter is None or group.stacks_experts
    if group.keeps_quantization and quantization.layout == "fp8-block":
        first_of_each = [sources[0].data.shape for sources in group.by_pattern().values()]
        group.block = common_block(quantization.block, first_of_each)


def _check_scale(source: Source, quantization: Quantization) -> None:
    assert source.scale is not None
    expected = scale_shape(source.data.shape, quantization.block)
    if source.scale.shape != expected and prod(source.scale.shape) * prod(expected) != 1:
        raise ConversionError(
            f"{source.scale.file}: {source.scale.key} has shape {list(source.scale.shape)}, but weight_block_size "
            f"{quantization.block} in config.json makes it {list(expected)}."
        )


def _check_shape(group: Group, target: Target, quantization: Quantization | None) -> None:
    shapes = [source.data.shape for source in group.sources]
    if group.keeps_quantization and quantization is not None and quantization.layout == "mxfp4":
        # Two values a byte: [E, N, K / 32, 16] is the parameter [E, K, N].
        experts, rows, blocks, width = shapes[0] if len(shapes[0]) == 4 else (0, 0, 0, 0)
        found: object = (experts, blocks * width * 2, rows)
        fits = found == target.shape
    elif group.converter is None:
        found, fits = shapes[0], shapes[0] == target.shape
    elif group.stacks_experts:
        found = f"{len(shapes)} tensors, such as {group.sources[0].data.key} {list(shapes[0])}"
        counts = {len(sources) for sources in group.by_pattern().values()}
        fits = counts == {target.shape[0]} and sum(map(prod, shapes)) == prod(target.shape)
    else:
        return  # only running the converter tells
    if not fits or (len(shapes) > 1 and group.converter is None):
        found = list(found) if isinstance(found, tuple) else found
        raise ConversionError(
            f"{group.sources[0].data.file}: {target.name} has shape {list(target.shape)} by config.json, but the "
            f"checkpoint has {found}."
        )


def _record(target: Target, group: Group, quantization: Quantization | None, layout_of: LayoutOf) -> Record:
    if not group.keeps_quantization or quantization is None:
        layout = layout_of(target.name, target.shape, target.dtype)
        return Record(target.name, target.unit, target.shape, Entry(target.name, target.dtype, target.shape), layout)
    layout = quantization.layout
    first = group.sources[0]
    assert first.scale is not None
    data_shape, grid = target.shape, first.scale.shape
    if layout == "mxfp4":
        data_shape = first.data.shape
    else:
        assert group.block is not None
        parts = [sources[0].data.shape[-2] for sources in group.by_pattern().values()]
        rows = sum(-(-part // group.block[0]) for part in parts)
        grid = (*target.shape[:-2], rows, -(-target.shape[-1] // group.block[1]))
    # e8m0 scales become fp32, which torch can compute with on every device.
    scale_dtype = torch.float32 if first.scale.dtype == torch.float8_e8m0fnu else first.scale.dtype
    data = Entry(data_entry_key(target.name, layout), first.data.dtype, data_shape)
    scale = Entry(scale_entry_key(target.name, layout), scale_dtype, grid)
    block = group.block if layout == "fp8-block" else quantization.block
    return Record(target.name, target.unit, target.shape, data, layout, scale, block)


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{len(names)} tensor{'s' * (len(names) != 1)} ({shown})"


def _named(definition: Definition) -> str:
    return type(definition.model).__name__
