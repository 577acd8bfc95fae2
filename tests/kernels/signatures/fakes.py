"""Stand-ins for flashinfer and deep_ep whose methods take what the released ones take, and no more."""

import json
from types import SimpleNamespace
from typing import Any

from tests.kernels.signatures.extract import RELEASED

SIGNATURES = json.loads(RELEASED.read_text())["signatures"]


def bound(class_name: str, method: str, *args: Any, **kwargs: Any) -> SimpleNamespace:
    """The arguments by parameter name, without those left out. Raises TypeError where the released method would."""
    parameters = SIGNATURES[class_name][method]
    namespace: dict[str, Any] = {}
    exec(f"def call({parameters}): return locals()", namespace)
    given = namespace["call"](None, *args, **kwargs)
    return SimpleNamespace(**{name: value for name, value in given.items() if value is not ...})
