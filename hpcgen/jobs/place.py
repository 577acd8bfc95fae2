"""Where an instance runs, as fields of its events."""

import os
from dataclasses import asdict
from typing import Any

from hpcgen.cluster.assemble import ClusterAssembly
from hpcgen.cluster.world import World
from hpcgen.engine.build import EngineOptions, RankAssembly


def place_fields(world: World, options: EngineOptions) -> dict[str, Any]:
    """Ranks, hosts, device, and the job of Slurm where there is one."""
    found = {"ranks": world.size, "hosts": list(world.hosts), "device": options.device.type}
    job = os.environ.get("SLURM_JOB_ID")
    return found | ({"job": job} if job else {})


def memory_fields(assembly: RankAssembly) -> dict[str, Any]:
    """What a rank has for KV and on its device."""
    return {
        "host_pages": assembly.store.count,
        "page_bytes": assembly.model.kv_layout.page_bytes,
        "backed_by": assembly.pool.kind if isinstance(assembly, ClusterAssembly) else None,
        "device_budget": assembly.budget.limit,
        "phases": {phase.value: asdict(memory) for phase, memory in (assembly.phases or {}).items()},
    }
