"""hpcgen: batch LLM inference for supercomputers, as sequence coroutines over MPI and Slurm."""

import os
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Threads that wait for each other must not spin: where anything else wants the cores (a tokenizer, another rank, a
# neighbour on the node) spinning made small parallel regions 30 times slower. libgomp reads it once, at torch's import.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "passive"
    # A short spin, some microseconds, costs others nothing and saves most of the waking up.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

if TYPE_CHECKING:
    from hpcgen.api import LLM as LLM
    from hpcgen.api import SamplingParams as SamplingParams
    from hpcgen.api import submit as submit
    from hpcgen.api import submit_chat as submit_chat

_API = ("LLM", "SamplingParams", "submit", "submit_chat")


def __getattr__(name: str) -> Any:
    """The Python API, imported when it is used: torch and transformers take seconds."""
    if name in _API:
        from hpcgen import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_API])
