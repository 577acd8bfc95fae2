import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcgen.planner.roofline import Roofline, Work, fit

WORKS = [Work(flops, nbytes) for flops in (1e6, 1e8, 1e10, 1e11) for nbytes in (1e4, 1e6, 1e8, 1e9)]


@settings(max_examples=50, deadline=None)
@given(st.floats(1e-6, 1e-4), st.floats(1e11, 1e13), st.floats(1e9, 1e11))
def test_the_constants_of_an_exact_roofline_are_found_again(fixed, flops, bandwidth):
    true = Roofline(fixed, flops, bandwidth)
    found = fit(WORKS, [true.seconds(work) for work in WORKS])
    assert found.worst_error < 0.05
    assert found.median_error < 0.01


def test_a_kernel_that_only_reads_has_no_compute_roof():
    works = [Work(0.0, nbytes) for nbytes in (1e5, 1e6, 1e7, 1e8)]
    found = fit(works, [1e-5 + work.bytes / 1e10 for work in works]).roofline
    assert found.bytes_per_second == pytest.approx(1e10, rel=0.01)
    assert found.flops_per_second == float("inf")


def test_noise_of_ten_percent_leaves_an_error_of_that_size():
    true = Roofline(1e-5, 1e12, 1e10)
    noise = (0.9, 1.1, 1.0, 0.95, 1.05)
    found = fit(WORKS, [true.seconds(work) * noise[i % 5] for i, work in enumerate(WORKS)])
    assert 0.01 < found.median_error < 0.1


def test_nothing_cannot_be_fitted():
    with pytest.raises(ValueError, match="at least one"):
        fit([], [])
