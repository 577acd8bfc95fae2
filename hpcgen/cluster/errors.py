"""Errors of a cluster that a user or a site can mend."""

from hpcgen.errors import HpcgenError


class ClusterError(HpcgenError):
    """The ranks cannot work together as they were started."""
