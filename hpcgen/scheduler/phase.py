"""When to prefill and when to decode."""

from __future__ import annotations

from hpcgen.scheduler.admission import can_prefill
from hpcgen.scheduler.plan import Phase
from hpcgen.scheduler.state import Cluster, Node


class PhaseChoice:
    """Prefill until the host stores are at their watermark, then decode until some node runs dry."""

    def __init__(self, cluster: Cluster):
        self.cluster = cluster
        self.phase = Phase.PREFILL
        self.full_load = [cluster.limits.max_active * len(node.ranks) for node in cluster.nodes]
        """Sequences each node counts as enough: what the last prefill phase could make room for."""

    def wants_prefill(self) -> bool:
        """Whether to go on prefilling, or to leave decode for it."""
        if not can_prefill(self.cluster):
            return False
        return self.phase is Phase.PREFILL or self._runs_dry()

    def enter_decode(self) -> None:
        """Remember how full a prefill phase got: with sequences left waiting, memory was what ended it."""
        if self.phase is Phase.PREFILL:
            for index, node in enumerate(self.cluster.nodes):
                capacity = self.cluster.limits.max_active * len(node.ranks)
                live = node.active + len(node.suspended)
                self.full_load[index] = min(capacity, live) if self.cluster.waiting else capacity
        self.phase = Phase.DECODE

    def _runs_dry(self) -> bool:
        """Whether a node has nothing suspended, nor can get it by MIGRATE, and too few active."""
        nodes = self.cluster.nodes
        elsewhere = self.cluster.limits.migrate and any(node.suspended for node in nodes)
        if elsewhere:
            return False
        return any(self._is_dry(node, load) for node, load in zip(nodes, self.full_load, strict=True))

    def _is_dry(self, node: Node, full_load: int) -> bool:
        if not node.ranks or node.suspended or node.incoming:
            return False
        active = node.active
        return not active or active < self.cluster.limits.refill_below * full_load
