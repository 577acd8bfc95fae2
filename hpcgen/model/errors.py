"""Errors of a model directory: what is wrong with it, and what to do."""

from hpcgen.errors import HpcgenError


class ModelError(HpcgenError):
    """A model directory that cannot be read, or an architecture that this engine does not run."""
