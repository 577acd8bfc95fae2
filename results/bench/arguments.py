"""Arguments that the benchmark's programs share."""

import argparse
from pathlib import Path


def parse_pair(text: str) -> tuple[str, Path]:
    """'NAME=DIRECTORY' -> (name, absolute path)."""
    name, separator, path = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError("NAME=DIRECTORY")
    return name, Path(path).absolute()
