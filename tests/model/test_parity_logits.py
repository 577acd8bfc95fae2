"""Logits of every supported family against transformers' own eager forward, over ragged mixtures of chunks.

fp32: sums are taken in another order (attention by pages, experts one by one, MLA absorbed), which leaves differences
of a few 1e-6 on logits of about 5. Nothing in between, a wrong mask or position say, is smaller than 1e-2.

bf16: two correct implementations differ by more than a wrong detail may weigh, since a rounding can flip a router's
choice. So both are compared with the same weights in fp32: ours may not be further from it than transformers' own bf16
is. Measured over three seeds, the ratio of the median errors is 0.73 to 1.09; that of the root mean squares, which
flipped experts dominate, 0.72 to 1.49.
"""

import copy

import pytest
import torch

from .paged import PagedRunner, bound_model, run_plan
from .tiny_models import TINY, VOCABULARY, build_tiny

FP32_TOLERANCE = 2e-5
LENGTHS = (90, 17, 141, 9)
# New tokens of each sequence by forward; pages hold 64, so chunks end within, at and past the end of a page.
MIXTURES = {
    "ragged prefill": [[200, 200, 200, 200]],
    "chunked prefill": [[20, 5, 133, 3], [44, 5, 8, 3], [200, 200, 200, 200]],
    "prefill, then decode": [[80, 7, 131, 2], *[[1, 1, 1, 1]] * 10],
    "prefill, decode and chunks mixed": [
        [64, 0, 128, 1],
        [1, 9, 1, 1],
        [24, 1, 1, 1],
        [1, 0, 0, 1],
        [0, 1, 3, 1],
        [200] * 4,
    ],
}


def random_tokens(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in LENGTHS]


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("name", TINY)
def test_fp32_logits_are_those_of_transformers(name, mixture):
    reference = build_tiny(name, torch.float32)
    model = bound_model(reference, TINY[name][0], torch.float32)
    tokens = random_tokens(seed=0)
    with torch.inference_mode():
        found = run_plan(PagedRunner(model, len(tokens)), tokens, MIXTURES[mixture])
        for sequence, logits in zip(tokens, found, strict=True):
            expected = reference(sequence[None], use_cache=False).logits[0]
            torch.testing.assert_close(logits, expected, atol=FP32_TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", TINY)
def test_bf16_logits_are_as_near_to_fp32_as_those_of_transformers(name):
    reference = build_tiny(name, torch.bfloat16)
    exact_model = copy.deepcopy(reference).float()
    model = bound_model(reference, TINY[name][0], torch.bfloat16)
    tokens = random_tokens(seed=0)
    with torch.inference_mode():
        plan = MIXTURES["prefill, decode and chunks mixed"]
        ours = torch.cat(run_plan(PagedRunner(model, len(tokens)), tokens, plan)).float()
        theirs = torch.cat([reference(s[None], use_cache=False).logits[0] for s in tokens]).float()
        exact = torch.cat([exact_model(s[None], use_cache=False).logits[0] for s in tokens])
    our_error, their_error = (ours - exact).abs(), (theirs - exact).abs()
    assert our_error.median() <= 1.25 * their_error.median()
    assert our_error.square().mean().sqrt() <= 2 * their_error.square().mean().sqrt()


def test_only_the_rows_asked_for_get_logits():
    reference = build_tiny("qwen3_moe", torch.float32)
    model = bound_model(reference, "qwen3_moe", torch.float32)
    tokens = random_tokens(seed=1)
    runner = PagedRunner(model, len(tokens))
    context = runner.context(dict(enumerate(tokens)))
    last_rows = context.batch.query_offsets[1:].long() - 1
    with torch.inference_mode():
        logits = model.forward(model.embed(torch.cat(tokens)), context, last_rows)
        expected = torch.stack([reference(s[None], use_cache=False).logits[0, -1] for s in tokens])
    torch.testing.assert_close(logits, expected, atol=FP32_TOLERANCE, rtol=0)


@pytest.mark.parametrize("rows", [None, torch.zeros(0, dtype=torch.int64)])
def test_a_forward_without_logits_needs_no_head(rows):
    model = bound_model(build_tiny("llama", torch.float32), "llama", torch.float32)
    model.unbind("head")
    runner = PagedRunner(model, 1)
    tokens = torch.arange(3, 20)
    with torch.inference_mode():
        logits = model.forward(model.embed(tokens), runner.context({0: tokens}), rows)
    assert logits.shape == (0, VOCABULARY)
