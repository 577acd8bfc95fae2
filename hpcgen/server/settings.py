"""What the operator decides: limits, and where things lie."""

from dataclasses import dataclass
from pathlib import Path

from hpcgen.batch.reader import MAX_LINE_BYTES
from hpcgen.durable import DIRECTORY_MODE
from hpcgen.server.errors import ServerError


@dataclass(frozen=True, slots=True)
class Limits:
    """What a client may ask for. Sizes in bytes."""

    file_bytes: int = 2**30
    line_bytes: int = MAX_LINE_BYTES
    body_bytes: int = 2**20
    """Of a request that is not an upload."""
    files: int = 10_000
    """Files of one token, outputs included."""
    requests_per_batch: int = 1_000_000
    queued_batches: int = 100
    """Unfinished batches of all tokens."""
    queued_requests: int = 10_000_000
    """Requests in them. One batch is always admitted, however large."""
    in_flight: int = 64
    """HTTP requests at once."""
    idle_seconds: float = 60.0
    """A client that sends nothing for so long, in the middle of a body, is not waited for."""
    least_rate: int = 1024
    """Bytes/s. One whose body takes longer than that, and than `idle_seconds`, holds a place that others wait for."""
    retry_after: int = 30
    """Seconds that a client is told to wait when the server is full."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where the server keeps what it is entrusted with. Ids in paths are the server's own, never a client's text."""

    root: Path

    @property
    def database(self) -> Path:
        return self.root / "state.sqlite"

    @property
    def files(self) -> Path:
        return self.root / "files"

    @property
    def batches(self) -> Path:
        return self.root / "batches"

    def file(self, id: str) -> Path:
        return self.files / id

    def batch(self, id: str) -> Path:
        return self.batches / id

    def input(self, batch: str) -> Path:
        """The batch's input: a second name of the file, so that deleting the file does not matter."""
        return self.batch(batch) / "input.jsonl"

    def run(self, batch: str) -> Path:
        return self.batch(batch) / "run"

    def make(self) -> None:
        """Raises ServerError: the directories cannot be made."""
        try:
            for directory in (self.root, self.files, self.batches):
                directory.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        except OSError as error:
            raise ServerError(f"cannot write the directory of the server, {self.root}: {error.strerror}") from None
