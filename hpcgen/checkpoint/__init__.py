"""Checkpoints of sequence states in HDF5: written by each node, restored on any number of them."""

from hpcgen.checkpoint.manifest import Manifest, NodeFile, commit, next_epoch
from hpcgen.checkpoint.periodic import BackgroundWrite, CheckpointSchedule
from hpcgen.checkpoint.reader import Checkpoint, CheckpointReader, DamagedCheckpoint, StoredKV
from hpcgen.checkpoint.show import show
from hpcgen.checkpoint.writer import CheckpointFailed, CheckpointWriter, Snapshot

__all__ = [
    "BackgroundWrite",
    "Checkpoint",
    "CheckpointFailed",
    "CheckpointReader",
    "CheckpointSchedule",
    "CheckpointWriter",
    "DamagedCheckpoint",
    "Manifest",
    "NodeFile",
    "Snapshot",
    "StoredKV",
    "commit",
    "next_epoch",
    "show",
]
