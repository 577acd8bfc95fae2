import dataclasses

import numpy as np
import pytest
import torch

from hpcgen.kernels.attention.kv_layout import KVLayout
from hpcgen.planner.kernel_timing import KernelTiming, Stopwatch, disk_reads
from hpcgen.planner.model_shape import ModelShape
from hpcgen.planner.profile import _non_negative, measure, sized_as
from hpcgen.planner.profile_file import Profile
from tests.model.tiny_models import save_tiny


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    """Of a tiny model with experts."""
    directory = tmp_path_factory.mktemp("profiled")
    save_tiny("qwen3_moe", directory, torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hpcgen.planner.kernel_timing.COLD", 1 << 20)
        patch.setattr("hpcgen.planner.kernel_timing.TOKENS", (1, 16, 64, 128, 256))
        patch.setattr("hpcgen.planner.profile.LOADS", ((1, 8), (4, 16), (16, 8)))
        measured = measure(directory, dtype="float32")
    return directory, measured


def test_every_kernel_is_fitted_and_every_link_measured(profile):
    _, measured = profile
    assert set(measured.fits) == {"linear", "decode_attention", "prefill_attention", "experts"}
    assert set(measured.links) == {"host", "back", "local", "remote", "window", "disk"}
    assert all(measured.links[name].points >= 3 for name in ("host", "back", "disk"))
    assert all(fit.points >= 5 for fit in measured.fits.values())
    assert all(link.bandwidth > 1e6 for link in measured.links.values())
    assert measured.machine["torch"] == torch.__version__


def test_a_profile_survives_its_file(profile, tmp_path):
    _, measured = profile
    measured.write(tmp_path / "profile.json")
    assert Profile.read(tmp_path / "profile.json") == measured


def test_the_costs_of_a_profile_are_positive_and_grow(profile):
    directory, measured = profile
    costs = measured.costs(sized_as(ModelShape.read(directory), torch.float32))
    assert not costs.streamed
    assert 0 < costs.attention_decode_seconds(1, 100) <= costs.attention_decode_seconds(1000, 10**7)
    assert 0 < costs.experts_seconds(1, 1, 1) <= costs.experts_seconds(10**6, 10**6, 1)


def test_residuals_are_fitted_by_constants_that_are_not_negative():
    rows = np.array([[1.0, 10.0], [1.0, 20.0], [1.0, 40.0]])
    assert _non_negative(rows, rows @ [3.0, 0.5], np.ones(3)) == pytest.approx([3.0, 0.5])
    assert _non_negative(rows, rows @ [-3.0, 0.5], np.ones(3))[0] == 0.0


def test_latent_attention_is_measured_too():
    shape = dataclasses.replace(ModelShape.read(_deepseek()), hidden=64, vocabulary=128)
    layout = KVLayout(2, 1, 32, 1, 16, torch.float32)
    attention = dataclasses.replace(shape.attention, decode_flops=2 * 4 * (2 * 32 + 16), kv_elements=48)
    timings = KernelTiming(
        dataclasses.replace(shape, attention=attention), layout, torch.float32, Stopwatch(torch.device("cpu"))
    ).decode_attention()
    assert all(timing.seconds > 0 for timing in timings)


def test_a_stopwatch_takes_the_median():
    def calls():
        while True:
            yield lambda: None

    assert 0 <= Stopwatch(torch.device("cpu")).seconds(calls(), budget=0.0) < 0.1


def test_a_disk_is_read(tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 10_000_000)
    timings = disk_reads(tmp_path / "file")
    assert [timing.work.bytes for timing in timings] == [1 << 14, 1 << 18, 1 << 21, 1 << 23]
    assert all(timing.seconds > 0 for timing in timings)


def _deepseek():
    from tests.planner.shapes import PUBLISHED

    return PUBLISHED / "deepseek_r1.json"
