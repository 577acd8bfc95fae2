"""What the user of `hpcgen run` asked for."""

from dataclasses import dataclass, field
from pathlib import Path

from hpcgen.batch.source import TemplateOptions
from hpcgen.jobs.instance import InstanceOptions
from hpcgen.jobs.leases import EXPIRY_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(InstanceOptions):
    """What the user asked for."""

    input: Path
    output: Path
    run_directory: Path | None = None
    template: TemplateOptions = field(default_factory=TemplateOptions)
    sub_batch: int | None = None
    checkpoint_interval: float = 600.0
    """Seconds; 0: only before leaving."""
    grace: float | None = None
    """Seconds from a stop signal to the kill; None: what Slurm says."""
    instance: str | None = None
    """Name of this one of the instances that share the run directory; None: the run is this process's alone."""
    lease_ahead: int = 1
    """Sub-batches that an instance leases before it needs them."""
    lease_expiry: float = EXPIRY_SECONDS
    """Seconds without a sign of life after which others take over what an instance leases."""
