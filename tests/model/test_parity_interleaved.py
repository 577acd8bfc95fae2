"""Forwards that are suspended in the middle and resumed in turn, as microbatches are, do not disturb one another."""

import pytest
import torch
from greenlet import getcurrent, greenlet

from hpcgen.model.causal import CausalModel

from .paged import PagedRunner, bound_model
from .tiny_models import TINY, VOCABULARY, build_tiny


def suspend_at_stages(model: CausalModel) -> None:
    """Every attention and experts stage gives way to the parent greenlet before it runs."""
    for index in range(model.layers):
        for stage in (model.attention_stage(index), model.experts_stage(index)):
            stage.forward = suspended(stage.forward)


def suspended(forward):
    def run(*args, **kwargs):
        getcurrent().parent.switch()
        return forward(*args, **kwargs)

    return run


@pytest.mark.parametrize("name", TINY)
def test_interleaved_forwards_are_bitwise_those_run_alone(name):
    generator = torch.Generator().manual_seed(3)
    steps = [
        {0: torch.randint(3, VOCABULARY, (70,), generator=generator), 1: torch.tensor([5, 6])},
        {2: torch.randint(3, VOCABULARY, (30,), generator=generator)},
        {3: torch.tensor([9])},
    ]
    reference = build_tiny(name, torch.float32)
    model = bound_model(reference, TINY[name][0], torch.float32)
    interleaved_model = bound_model(reference, TINY[name][0], torch.float32)
    suspend_at_stages(interleaved_model)
    with torch.inference_mode():
        alone = PagedRunner(model, 4)
        expected = [torch.cat(alone.run(chunks)) for chunks in steps]
        runner = PagedRunner(interleaved_model, 4)
        forwards = [greenlet(lambda chunks=chunks: torch.cat(runner.run(chunks))) for chunks in steps]
        found: dict[int, torch.Tensor] = {}
        switches = 0
        while len(found) < len(forwards):
            for index, forward in enumerate(forwards):
                if not forward.dead:
                    outcome = forward.switch()
                    switches += 1
                    if forward.dead:
                        found[index] = outcome
    assert switches == len(steps) * (2 * model.layers + 1)
    assert all(torch.equal(found[index], logits) for index, logits in enumerate(expected))


def test_each_layer_reports_once_that_it_is_done():
    model = bound_model(build_tiny("gpt_oss", torch.float32), "gpt_oss", torch.float32)
    runner = PagedRunner(model, 1)
    context = runner.context({0: torch.arange(3, 9)})
    done: list[int] = []
    context = type(context)(context.batch, context.attention, context.kv, done.append)
    with torch.inference_mode():
        model.forward(model.embed(torch.arange(3, 9)), context, None)
    assert done == list(range(model.layers))
