"""Requests in, results out: the input file, tokenization ahead of the engine, the journal, and the output files."""

from hpcgen.batch.intake import Intake, IntakeError, IntakeItem
from hpcgen.batch.journal import Journal, JournalError
from hpcgen.batch.reader import BatchInput, InputError
from hpcgen.batch.request import Request, RequestError
from hpcgen.batch.run_directory import Manifest, RunDirectory, RunDirectoryError

__all__ = [
    "BatchInput",
    "InputError",
    "Intake",
    "IntakeError",
    "IntakeItem",
    "Journal",
    "JournalError",
    "Manifest",
    "Request",
    "RequestError",
    "RunDirectory",
    "RunDirectoryError",
]
