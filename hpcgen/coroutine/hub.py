"""The hub: suspends the forward passes of microbatches at yield points, and resumes what can run together.

A microbatch's forward runs in a greenlet, so an unedited model definition can be left in the middle of `forward`
(paper §4.3). The hub is layer-synchronous: the lowest yield point first, microbatches in their order within it. So
streamed parameters are bound once a layer, and a prompt that spans microbatches finds the KV of its earlier part.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from greenlet import getcurrent, greenlet

from hpcgen.coroutine.call import ModuleCall, YieldPoint


class Primitives(Protocol):
    """What a wrapper's policy can do with a call (paper §4.1)."""

    def yield_(self, call: ModuleCall) -> Any:
        """YIELD: suspends the microbatch until its yield point is the lowest, then runs the module on it alone."""

    def combine(self, call: ModuleCall) -> Any:
        """COMBINE: suspends the microbatch until all have come to this point; the module runs on them as one batch."""

    def partition(self, call: ModuleCall, shards: Sequence[Callable[..., Any]]) -> Any:
        """PARTITION: runs the module as `shards`, each on the same input, and adds their partial outputs."""

    def migrate(self, call: ModuleCall, destination: int) -> Any:
        """MIGRATE: asks for the microbatch's sequences to be moved to another host store after this step; runs the
        module here meanwhile."""


class HubError(RuntimeError):
    """A wrapped module was called outside of the hub, or returned a shape that cannot be split."""


class Hub:
    """Runs microbatches as coroutines. One hub a thread: greenlets do not cross threads."""

    def __init__(self, before: Callable[[YieldPoint], None], expert_batch: int):
        """`before(point)` makes a point ready to run (binds parameters); called before every resume at it.
        `expert_batch`: most tokens that COMBINE puts into one call of a module (`B_moe`)."""
        self._before = before
        self._expert_batch = expert_batch
        self._hub: greenlet | None = None
        self._waiting: dict[YieldPoint, list[_Suspended]] = {}
        self.migration_requests: list[tuple[int, int]] = []
        """(index of the microbatch, destination) of each `migrate` since the last `run` began."""

    def run(self, forwards: Sequence[Callable[[], Any]]) -> list[Any]:
        """Runs the forwards, interleaved at their yield points, and returns what each returned.

        An exception in one of them ends all: the others are unwound, and the exception is raised here.
        """
        self._hub, self._waiting, self.migration_requests = getcurrent(), {}, []
        results: list[Any] = [None] * len(forwards)
        coroutines = [greenlet(forward) for forward in forwards]
        try:
            for index, coroutine in enumerate(coroutines):
                coroutine.microbatch = index
                self._advance(coroutine, results)
            while self._waiting:
                point = min(self._waiting)
                batch = self._waiting.pop(point)
                self._run_point(point, batch, results)
        finally:
            self._hub, self._waiting = None, {}
            for coroutine in coroutines:
                if coroutine and not coroutine.dead:
                    coroutine.throw()
        return results

    def yield_(self, call: ModuleCall) -> Any:
        self._suspend(call, combine=False)
        return call()

    def combine(self, call: ModuleCall) -> Any:
        return self._suspend(call, combine=True)

    def partition(self, call: ModuleCall, shards: Sequence[Callable[..., Any]]) -> Any:
        self._suspend(call, combine=False)
        partials = [shard(*call.args, **call.kwargs) for shard in shards]
        if isinstance(partials[0], tuple):
            return (sum(p[0] for p in partials), *partials[0][1:])
        return sum(partials)

    def migrate(self, call: ModuleCall, destination: int) -> Any:
        self.migration_requests.append((getcurrent().microbatch, destination))
        return self.yield_(call)

    def _suspend(self, call: ModuleCall, combine: bool) -> Any:
        if self._hub is None or getcurrent() is self._hub:
            raise HubError(f"{call.point} was called outside of Hub.run")
        return self._hub.switch(_Suspended(getcurrent(), call, combine))

    def _advance(self, coroutine: greenlet, results: list[Any], value: Any = None) -> None:
        """Resumes a coroutine until it suspends again or ends."""
        outcome = coroutine.switch(value) if coroutine else coroutine.switch()
        if coroutine.dead:
            results[coroutine.microbatch] = outcome
        else:
            self._waiting.setdefault(outcome.call.point, []).append(outcome)

    def _run_point(self, point: YieldPoint, batch: "list[_Suspended]", results: list[Any]) -> None:
        batch.sort(key=lambda suspended: suspended.coroutine.microbatch)
        for suspended in batch:
            if not suspended.combine:
                self._before(point)
                self._advance(suspended.coroutine, results)
        for group in self._groups([suspended for suspended in batch if suspended.combine]):
            self._before(point)
            for suspended, output in zip(group, _run_combined(group), strict=True):
                self._advance(suspended.coroutine, results, output)

    def _groups(self, batch: "list[_Suspended]") -> "list[list[_Suspended]]":
        """Cuts the batch where it would pass `expert_batch` tokens; a microbatch is never cut."""
        groups: list[list[_Suspended]] = []
        tokens = 0
        for suspended in batch:
            count = suspended.tokens
            if not groups or tokens + count > self._expert_batch:
                groups.append([])
                tokens = 0
            groups[-1].append(suspended)
            tokens += count
        return groups


class _Suspended:
    """A coroutine that waits at a yield point."""

    __slots__ = ("call", "combine", "coroutine")

    def __init__(self, coroutine: greenlet, call: ModuleCall, combine: bool):
        self.coroutine, self.call, self.combine = coroutine, call, combine

    @property
    def tokens(self) -> int:
        hidden = self.call.hidden
        return hidden.numel() // hidden.shape[-1]


def _run_combined(group: list[_Suspended]) -> list[Any]:
    """One call of the module over the concatenated tokens of the group, split again.

    Modules return a tensor, or a tuple whose first item is one and whose rest (router logits) nobody reads.
    """
    if len(group) == 1:
        return [group[0].call()]
    hidden = [suspended.call.hidden for suspended in group]
    flat = torch.cat([h.reshape(-1, h.shape[-1]) for h in hidden])
    output = group[0].call.run(flat[None])
    tensor = output[0] if isinstance(output, tuple) else output
    parts = tensor.reshape(-1, tensor.shape[-1]).split([suspended.tokens for suspended in group])
    shaped = [part.view(*h.shape[:-1], part.shape[-1]) for part, h in zip(parts, hidden, strict=True)]
    return [(part, None) for part in shaped] if isinstance(output, tuple) else shaped
