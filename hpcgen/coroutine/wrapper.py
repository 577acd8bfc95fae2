"""The module wrapper: turns a call of an `nn.Module` of an unchanged model definition into a yield point."""

from collections.abc import Callable
from typing import Any

from torch import nn

from hpcgen.coroutine.call import ModuleCall, Stage, YieldPoint
from hpcgen.coroutine.hub import Primitives

Policy = Callable[[ModuleCall, Primitives], Any]
"""Decides what a call does: any callable of the primitives. It returns the module's output."""


def yield_policy(call: ModuleCall, primitives: Primitives) -> Any:
    """Default at a decoder layer and at the head: YIELD, so that the layer's parameters are bound before it runs.

    The paper's wrappers yield on exit; exit of one module is entry to the next, and entry is where the next one's
    parameters are needed.
    """
    return primitives.yield_(call)


def combine_policy(call: ModuleCall, primitives: Primitives) -> Any:
    """Default at the MoE or MLP of a layer: COMBINE, so that experts see far more tokens than attention does."""
    return primitives.combine(call)


DEFAULT_POLICIES: dict[Stage, Policy] = {
    Stage.ATTENTION: yield_policy,
    Stage.EXPERTS: combine_policy,
    Stage.HEAD: yield_policy,
}


def wrap(module: nn.Module, point: YieldPoint, primitives: Primitives, policy: Policy) -> None:
    """Puts `policy` between the callers of `module` and its forward. `unwrap` undoes it.

    `nn.Module.__call__` looks `forward` up on the instance, so the class stays as it is.
    """
    own_forward = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return policy(ModuleCall(point, own_forward, args, kwargs), primitives)

    forward.hpcgen_wrapped = own_forward  # type: ignore[attr-defined]
    module.forward = forward  # type: ignore[method-assign]


def unwrap(module: nn.Module) -> None:
    """Gives a wrapped module its own forward back. A module that is not wrapped stays as it is."""
    own_forward = getattr(module.forward, "hpcgen_wrapped", None)
    if own_forward is not None:
        module.forward = own_forward
