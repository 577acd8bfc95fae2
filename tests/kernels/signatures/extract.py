"""Writes the signatures that our calls rely on, out of the sources of the pinned releases, into released.json.

    python -m tests.kernels.signatures.extract flashinfer_python-*.whl sgl_deep_ep-*.whl

Both packages import only with CUDA, so their sources are parsed. `pip download --no-deps` gets the wheels.
"""

import ast
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

RELEASED = Path(__file__).with_name("released.json")
WANTED = {
    "flashinfer.BatchPrefillWithPagedKVCacheWrapper": ("flashinfer/prefill.py", "__init__", "plan", "run"),
    "flashinfer.BatchDecodeWithPagedKVCacheWrapper": ("flashinfer/decode.py", "__init__", "_plan_impl", "run"),
    "flashinfer.BatchAttentionWithAttentionSinkWrapper": ("flashinfer/attention/_core.py", "__init__"),
    "flashinfer.mla.BatchMLAPagedAttentionWrapper": (
        "flashinfer/mla/_batch_mla/_wrapper.py",
        "__init__",
        "plan",
        "run",
    ),
    "flashinfer.mla.MLAPlanMetadata": ("flashinfer/mla/_batch_mla/_contracts.py", "csr"),
    "deep_ep.ElasticBuffer": ("deep_ep/buffers/elastic.py", "__init__", "dispatch", "combine", "destroy"),
}
"""Class -> the file of the wheel that defines it, and the methods that we call (`_plan_impl` is decode's)."""


def extract(sources: dict[str, str]) -> dict[str, dict[str, str]]:
    """`sources`: file -> text. Class -> method -> its parameters; `=...` where there is a default."""
    found: dict[str, dict[str, str]] = {}
    for name, (file, *methods) in WANTED.items():
        if file in sources:
            definitions = dict(_methods(ast.parse(sources[file]), name.rpartition(".")[2]))
            found[name] = {method: _parameters(definitions[method]) for method in methods}
    return found


def _methods(tree: ast.Module, class_name: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Methods of a class; of an overloaded one the last, which is the implementation."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            for member in node.body:
                if isinstance(member, ast.FunctionDef):
                    yield member.name, member


def _parameters(function: ast.FunctionDef) -> str:
    arguments = function.args
    for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]:
        if argument is not None:
            argument.annotation = None
    has_default = ast.Constant(...)
    arguments.defaults = [has_default for _ in arguments.defaults]
    arguments.kw_defaults = [default and has_default for default in arguments.kw_defaults]
    return ast.unparse(arguments)


def sources_of_wheel(path: Path) -> dict[str, str]:
    files = {file for file, *_ in WANTED.values()}
    with zipfile.ZipFile(path) as wheel:
        return {name: wheel.read(name).decode() for name in wheel.namelist() if name in files}


def main(wheels: list[str]) -> None:
    versions = dict(Path(wheel).name.split("-")[:2] for wheel in wheels)
    signatures = {name: found for wheel in wheels for name, found in extract(sources_of_wheel(Path(wheel))).items()}
    RELEASED.write_text(json.dumps({"versions": versions, "signatures": signatures}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
