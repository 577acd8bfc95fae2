"""Errors of a cluster that a user or a site can mend."""

from hpcgen.errors import HpcgenError


class ClusterError(HpcgenError):
    """The ranks cannot work together as they were started."""


class RankLost(ClusterError):
    """A rank is gone. The others have regrouped and can go on; what they were just asked has no answer."""
