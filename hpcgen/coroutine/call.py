"""What a coroutine hands to the hub when it suspends inside a forward pass."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import torch


class Stage(IntEnum):
    """Part of a layer, in the order in which a forward pass meets them."""

    ATTENTION = 0
    """The decoder layer up to its feed-forward part."""
    EXPERTS = 1
    """The MoE, or the dense MLP, of the layer."""
    HEAD = 2
    """The output head, after the last layer."""


class YieldPoint(NamedTuple):
    """An intra-forward yield point; the hub runs the smallest first, so that all of a layer runs together."""

    layer: int
    stage: Stage


@dataclass(slots=True)
class ModuleCall:
    """A call of a wrapped module, caught before it runs."""

    point: YieldPoint
    run: Callable[..., Any]
    """The module's own forward."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def hidden(self) -> torch.Tensor:
        """The module's input, [..., D]."""
        return self.args[0] if self.args else self.kwargs["hidden_states"]

    def __call__(self) -> Any:
        """Runs the module on the coroutine's own input."""
        return self.run(*self.args, **self.kwargs)
