"""A finding of the doctor: what was looked at, how it stands, and what to do."""

from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    OK = "ok"
    WARNING = "warning"
    """Works, but slower or less safely than it could."""
    ERROR = "error"
    """A run would fail."""
    SKIPPED = "skipped"
    """Does not concern this machine."""


@dataclass(frozen=True, slots=True)
class Check:
    """A finding."""

    name: str
    level: Level
    finding: str
    remedy: str = ""
    """What to do; empty where all is well."""
