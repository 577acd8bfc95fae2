"""Mistakes in what a plan is asked for."""

from hpcgen.errors import HpcgenError


class PlanError(HpcgenError):
    """A model, cluster, profile or workload that cannot be planned for, or one that fits nowhere."""
