"""The hub, on small modules whose calls can be counted, and on unchanged transformers models."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hpcgen.coroutine.call import ModuleCall, Stage, YieldPoint
from hpcgen.coroutine.hub import Hub, HubError, Primitives
from hpcgen.coroutine.wrapper import combine_policy, unwrap, wrap, yield_policy
from tests.model.tiny_models import build_tiny

LAYERS = 3


class Counted(nn.Module):
    """x -> x * factor, remembering how many tokens each call saw."""

    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor
        self.seen: list[int] = []

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.seen.append(hidden.numel() // hidden.shape[-1])
        return hidden * self.factor


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleList([Counted(2.0) for _ in range(LAYERS)])
        self.experts = nn.ModuleList([Counted(3.0) for _ in range(LAYERS)])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for attention, experts in zip(self.attention, self.experts, strict=True):
            hidden = hidden + experts(attention(hidden))
        return hidden


def wrapped(hub: Hub, experts: Any = combine_policy) -> Toy:
    toy = Toy()
    for layer in range(LAYERS):
        wrap(toy.attention[layer], YieldPoint(layer, Stage.ATTENTION), hub, yield_policy)
        wrap(toy.experts[layer], YieldPoint(layer, Stage.EXPERTS), hub, experts)
    return toy


def forwards(model: nn.Module, inputs: list[torch.Tensor]) -> list[Callable[[], torch.Tensor]]:
    return [lambda x=x: model(x) for x in inputs]


def test_attention_runs_by_microbatch_and_experts_over_all_of_them() -> None:
    toy = wrapped(hub := Hub(lambda point: None, expert_batch=100))
    inputs = [torch.randn(1, n, 4) for n in (5, 2, 7)]
    outputs = hub.run(forwards(toy, inputs))
    assert [module.seen for module in toy.attention] == [[5, 2, 7]] * LAYERS
    assert [module.seen for module in toy.experts] == [[14]] * LAYERS
    for x, y in zip(inputs, outputs, strict=True):
        torch.testing.assert_close(y, Toy()(x))


def test_an_expert_batch_is_cut_between_microbatches_and_never_within_one() -> None:
    toy = wrapped(hub := Hub(lambda point: None, expert_batch=8))
    hub.run(forwards(toy, [torch.randn(1, n, 4) for n in (5, 2, 7, 20, 1)]))
    assert toy.experts[0].seen == [7, 7, 20, 1]


def test_every_point_is_made_ready_before_each_resume_and_points_come_in_model_order() -> None:
    ready: list[YieldPoint] = []
    toy = wrapped(hub := Hub(ready.append, expert_batch=100))
    hub.run(forwards(toy, [torch.randn(1, 2, 4)] * 2))
    per_layer = [Stage.ATTENTION, Stage.ATTENTION, Stage.EXPERTS]
    assert ready == [YieldPoint(layer, stage) for layer in range(LAYERS) for stage in per_layer]


def test_an_exception_in_one_microbatch_unwinds_the_others_and_reaches_the_caller() -> None:
    toy = wrapped(hub := Hub(lambda point: None, expert_batch=100))
    unwound = []

    def failing() -> torch.Tensor:
        toy.attention[0](torch.randn(1, 1, 4))
        raise RuntimeError("attention of one microbatch")

    def patient() -> torch.Tensor:
        try:
            return toy(torch.randn(1, 1, 4))
        finally:
            unwound.append(True)

    with pytest.raises(RuntimeError, match="attention of one microbatch"):
        hub.run([patient, failing, patient])
    assert unwound == [True, True]
    hub.run(forwards(toy, [torch.randn(1, 1, 4)]))


def test_an_exception_in_a_combined_module_reaches_the_caller() -> None:
    toy = wrapped(hub := Hub(lambda point: None, expert_batch=100))
    inputs = [torch.randn(1, 1, 4), torch.randn(1, 1, 5)]
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        hub.run(forwards(toy, inputs))


def test_a_wrapped_module_says_that_it_was_called_outside_of_the_hub() -> None:
    toy = wrapped(Hub(lambda point: None, expert_batch=100))
    with pytest.raises(HubError, match="outside"):
        toy(torch.randn(1, 1, 4))


def test_unwrapping_gives_the_module_its_own_forward_back() -> None:
    toy = wrapped(Hub(lambda point: None, expert_batch=100))
    for module in [*toy.attention, *toy.experts]:
        unwrap(module)
        unwrap(module)
    x = torch.randn(1, 2, 4)
    torch.testing.assert_close(toy(x), Toy()(x))


def test_partition_adds_the_partial_outputs_of_shards_on_the_same_input() -> None:
    hub = Hub(lambda point: None, expert_batch=100)

    def two_shards(call: ModuleCall, primitives: Primitives) -> Any:
        return primitives.partition(call, [lambda h: h * 1.0, lambda h: h * 2.0])

    toy = wrapped(hub, experts=two_shards)
    x = torch.randn(1, 3, 4)
    torch.testing.assert_close(hub.run(forwards(toy, [x]))[0], Toy()(x))
    assert toy.experts[0].seen == []


def test_migrate_runs_the_module_here_and_leaves_a_request_for_after_the_step() -> None:
    hub = Hub(lambda point: None, expert_batch=100)

    def leave_from_the_last_layer(call: ModuleCall, primitives: Primitives) -> Any:
        if call.point.layer == LAYERS - 1 and call.hidden.shape[1] == 3:
            return primitives.migrate(call, destination=1)
        return primitives.combine(call)

    toy = wrapped(hub, experts=leave_from_the_last_layer)
    inputs = [torch.randn(1, n, 4) for n in (2, 3)]
    outputs = hub.run(forwards(toy, inputs))
    assert hub.migration_requests == [(1, 1)]
    for x, y in zip(inputs, outputs, strict=True):
        torch.testing.assert_close(y, Toy()(x))


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "mixtral", "gpt_oss"])
def test_an_unchanged_transformers_model_is_suspended_inside_forward_and_computes_the_same(name: str) -> None:
    model = build_tiny(name, torch.float32)
    inputs = [torch.randint(0, 256, (1, n), generator=torch.Generator().manual_seed(n)) for n in (5, 9, 12, 7)]
    with torch.inference_mode():
        expected = [model(ids, use_cache=False).logits for ids in inputs]
        hub = Hub(lambda point: None, expert_batch=1000)
        for index, layer in enumerate(model.model.layers):
            wrap(layer, YieldPoint(index, Stage.ATTENTION), hub, yield_policy)
            wrap(layer.mlp, YieldPoint(index, Stage.EXPERTS), hub, combine_policy)
        outputs = hub.run([lambda ids=ids: model(ids, use_cache=False).logits for ids in inputs])
    for y, x in zip(outputs, expected, strict=True):
        torch.testing.assert_close(y, x, rtol=1e-4, atol=1e-5)
