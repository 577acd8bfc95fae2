"""Whether plain `lm_eval --model hpcgen` works in this Python environment.

The harness lists its own models and asks no other package. A `.pth` file, which Python reads at its start, runs
`import_hook`, which adds ours to the list when the harness makes it.
"""

import sysconfig
from pathlib import Path

from hpcgen.errors import HpcgenError

NAME = "hpcgen_lm_eval.pth"
_HOOK = Path(__file__).with_name("import_hook.py")


def register() -> Path:
    """Adds the file to this environment; its path.

    Raises:
        HpcgenError: the environment is not writable.
    """
    path = _path()
    # What a .pth file runs is one line; it must be harmless where the package is gone.
    line = f"import os; p = {str(_HOOK)!r}; os.path.exists(p) and exec(compile(open(p).read(), p, 'exec'), {{}})\n"
    try:
        path.write_text(line)
    except OSError as error:
        raise HpcgenError(f"cannot write {path}: {error.strerror}; use `hpcgen evaluate`, which needs it not") from None
    return path


def unregister() -> Path:
    """Takes the file away again, if it is there; its path."""
    path = _path()
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise HpcgenError(f"cannot remove {path}: {error.strerror}") from None
    return path


def _path() -> Path:
    return Path(sysconfig.get_path("purelib")) / NAME
