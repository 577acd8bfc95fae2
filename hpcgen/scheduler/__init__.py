"""The policy: which sequences are prefilled, run, wait, move and give way. Pure Python, in pages and tokens."""

from hpcgen.scheduler.admission import NeverFits
from hpcgen.scheduler.plan import Chunk, Chunks, Limits, Migration, Phase, Plan, RankPlan, Report, Topology
from hpcgen.scheduler.scheduler import Scheduler

__all__ = [
    "Chunk",
    "Chunks",
    "Limits",
    "Migration",
    "NeverFits",
    "Phase",
    "Plan",
    "RankPlan",
    "Report",
    "Scheduler",
    "Topology",
]
