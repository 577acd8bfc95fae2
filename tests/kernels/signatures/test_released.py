import json
import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from tests.kernels.signatures.extract import RELEASED, WANTED, extract

PACKAGES = {"flashinfer_python": "flashinfer", "sgl_deep_ep": "deep_ep"}
recorded = json.loads(RELEASED.read_text())


@pytest.mark.parametrize("package", PACKAGES)
def test_recorded_signatures_are_those_of_the_pinned_release(package):
    requirements = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    pinned = re.search(rf"{package.replace('_', '-')}==([\w.]+)", requirements)
    assert pinned
    assert pinned[1] == recorded["versions"][package]


@pytest.mark.parametrize("package", PACKAGES)
def test_recorded_signatures_are_those_of_the_installed_package(package):
    try:
        installed = distribution(package)
    except PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    if installed.version != recorded["versions"][package]:
        pytest.skip(f"{package} {installed.version} is installed, not the pinned release")
    files = {file for file, *_ in WANTED.values() if file.startswith(PACKAGES[package])}
    found = extract({file: Path(str(installed.locate_file(file))).read_text() for file in files})
    assert found == {name: recorded["signatures"][name] for name in found}
