"""What the operator of a server can mend."""

from hpcgen.errors import HpcgenError


class ServerError(HpcgenError):
    """The server cannot be started as it was asked to."""
