"""What the unfinished sequences of a batch have generated so far, on disk: a restart of a local server goes on there.

Tokens only: KV is recomputed from them at the speed of prefill, and pages of all batches lie mixed in one host store.
"""

import logging
from pathlib import Path

from hpcgen.checkpoint.manifest import commit, next_epoch
from hpcgen.checkpoint.reader import CheckpointReader
from hpcgen.checkpoint.writer import CheckpointFailed, CheckpointWriter, Snapshot
from hpcgen.sequence import Sequence, Status

_log = logging.getLogger(__name__)


def snapshot(sequences: list[Sequence]) -> Snapshot | None:
    """Sequences of a batch as they are now, copied; None where there is nothing that a restart would not have anyway.

    A request that is in it is in it with all its samples: a restart does not read it from the input again.
    """
    begun = {sequence.request for sequence in sequences if sequence.output}
    taken = [sequence for sequence in sequences if sequence.request in begun]
    return Snapshot.of(taken, lambda sequence: 0) if taken else None


def save(directory: Path, taken: Snapshot) -> None:
    """Writes a checkpoint; the newest counts.

    Raises:
        CheckpointFailed: the disk is full, say; what was saved before is untouched.
    """
    epoch = next_epoch(directory)
    file = CheckpointWriter(directory).write_snapshot(epoch, taken)
    try:
        commit(directory, epoch, [file])
    except OSError as error:
        raise CheckpointFailed(f"checkpoint epoch {epoch} was not completed: {error.strerror}") from error


def load(directory: Path) -> list[Sequence]:
    """The sequences of the newest checkpoint that is whole, without KV; FINISHED ones are samples whose request waits
    for others."""
    checkpoint = CheckpointReader(directory, lambda line: _log.warning("%s", line)).latest({})
    if checkpoint is None:
        return []
    for sequence in checkpoint.sequences:
        sequence.kv_length, sequence.pages = 0, []
        if sequence.status is not Status.FINISHED:
            sequence.status = Status.WAITING
    return checkpoint.sequences


def forget(directory: Path) -> None:
    """The batch has ended: what the checkpoints held is in its results."""
    for file in directory.iterdir():
        file.unlink(missing_ok=True)
