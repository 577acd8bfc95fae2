"""Executes one rank's part of a plan: YIELD, discard, COMBINE, and then a wave or the decode steps."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from hpcgen.coroutine.lifecycle import Lifecycle
from hpcgen.engine.decode import DecodeInterval
from hpcgen.engine.forward import ForwardPass
from hpcgen.engine.prefill import run_wave
from hpcgen.engine.stopping import Stopping
from hpcgen.memory.device import Device
from hpcgen.memory.kv.interface import Span
from hpcgen.scheduler.plan import Chunk, Phase, Plan, RankPlan, Report
from hpcgen.sequence import Sequence, Status


@dataclass(slots=True)
class Activity:
    """What a rank has done so far, for progress and reports."""

    phase: Phase = Phase.PREFILL
    prefill_tokens: int = 0
    decode_tokens: int = 0
    waves: int = 0
    steps: int = 0
    seconds: dict[Phase, float] = field(default_factory=lambda: {Phase.PREFILL: 0.0, Phase.DECODE: 0.0})
    active: int = 0
    discarded: int = 0
    suspended: int = 0
    migrated: int = 0


class Peers(Protocol):
    """The other ranks, as far as decode steps meet them: experts are spread over all of them."""

    def enter(self, phase: Phase) -> None:
        """All ranks are in this phase from now on."""

    def any_active(self, active: int) -> bool:
        """Whether another step is due, where this rank has `active` sequences left. Collective where steps are."""

    def idle_step(self) -> None:
        """Takes part in a step of the others without a sequence of its own."""

    def close(self) -> None:
        """There will be no more steps. Collective."""


class Partition(Protocol):
    """Decode steps of one sequence by all ranks at once."""

    def decode(
        self, sequence: Sequence | None, steps: int, append: Callable[[Sequence, int], bool]
    ) -> tuple[int, bool]:
        """Up to `steps` tokens for the sequence that one rank gives; (steps done, whether `append` ended it)."""

    def leave(self) -> None:
        """Gives the device back."""


class NoPeers:
    """A rank whose steps concern nobody else."""

    def enter(self, phase: Phase) -> None:
        """Nobody is to know."""

    def any_active(self, active: int) -> bool:
        return active > 0

    def idle_step(self) -> None:
        """There is no step without a sequence."""

    def close(self) -> None:
        """There is nobody."""


class Executor:
    """The sequences that a rank works on, and how it works on them. It decides nothing."""

    def __init__(
        self,
        device: Device,
        forward: ForwardPass,
        stopping: Stopping,
        microbatch: Mapping[Phase, int],
        lifecycle: Lifecycle | None = None,
        on_progress: Callable[[Activity], None] = lambda activity: None,
    ):
        """`microbatch`: most tokens (prefill) or sequences (decode) of one attention call (`B_attn`).
        `on_progress` is called after every wave and decode step."""
        self._device, self._forward = device, forward
        self._stopping, self._microbatch, self.on_progress = stopping, microbatch, on_progress
        self.lifecycle = lifecycle or Lifecycle()
        self.activity = Activity()
        self.sequences: dict[int, Sequence] = {}
        """Unfinished sequences by id."""
        self.active: dict[int, Sequence] = {}
        """Those that decode now."""
        self.peers: Peers = NoPeers()
        self.partition: Partition | None = None
        """Needed where plans have a PARTITION."""
        self._partitioned = False
        self.side_task: Callable[[object], object] = lambda task: None
        """What a rank does between two decisions when it is asked to, such as its part of a checkpoint."""

    def execute(self, plan: Plan, part: RankPlan, report: Report) -> list[Sequence]:
        """Carries out what `leave` left of `part`, notes in `report` what was done, and returns what ended."""
        self._arrange(plan)
        self.peers.enter(plan.phase)
        self.activity.phase = plan.phase
        if plan.phase is Phase.PREFILL:
            return self._prefill(part, report)
        return self._decode(plan, part, report)

    def drop(self, sequence: Sequence) -> None:
        """Forgets an unfinished sequence, between two plans."""
        del self.sequences[sequence.id]
        self.active.pop(sequence.id, None)
        self._device.kv.drop(sequence)
        self._stopping.forget(sequence)
        sequence.error = "cancelled"
        self.lifecycle.move(sequence, Status.FAILED)

    def forget(self, key: int) -> None:
        """Another rank works on a sequence from now on; its KV stays in the host store."""
        sequence = self.sequences.pop(key, None)
        if sequence is not None:
            self._stopping.forget(sequence)

    def settle(self) -> None:
        """Filled pages of active sequences are in the host store when this returns: others may need them soon."""
        self._device.kv.settle()

    def suspend_all(self) -> None:
        """YIELD every active sequence: all KV is in the host store afterwards. For whoever stops between decisions."""
        for sequence in self.active.values():
            self._device.kv.suspend(sequence)
            self.lifecycle.move(sequence, Status.SUSPENDED)
        self.active.clear()

    def leave(self, part: RankPlan) -> None:
        """YIELD and discard: the first that is done for a part of a plan."""
        for key in part.discard:
            sequence = self.sequences[key]
            self.active.pop(key, None)
            self._device.kv.drop(sequence)
            self.lifecycle.move(sequence, Status.WAITING)
        for key in part.suspend:
            sequence = self.active.pop(key)
            self._device.kv.suspend(sequence)
            self.lifecycle.move(sequence, Status.SUSPENDED)
        self.activity.discarded += len(part.discard)
        self.activity.suspended += len(part.suspend)

    def _arrange(self, plan: Plan) -> None:
        """Gives the device to the phase, or to PARTITION, which finds KV in the host store."""
        partitioned = bool(plan.partition)
        if partitioned is self._partitioned:
            if not partitioned:
                self._device.enter(plan.phase)
            return
        assert self.partition is not None
        for sequence in self.active.values():
            self._device.kv.suspend(sequence)
        if partitioned:
            self._device.vacate()
        else:
            self.partition.leave()
            self._device.enter(plan.phase)
        for sequence in self.active.values():
            self._device.kv.resume(sequence)
        self._partitioned = partitioned

    def _prefill(self, part: RankPlan, report: Report) -> list[Sequence]:
        kv = self._device.kv
        spans = [self._span(chunk) for chunk in part.chunks]
        for span in spans:
            kv.extend(span.sequence, span.stop)
            self.lifecycle.move(span.sequence, Status.PREFILLING)
        sampled = run_wave(self._forward, spans, self._microbatch[Phase.PREFILL], kv.microbatch_pages)
        for span in spans:
            span.sequence.kv_length = span.stop
        report.prefilled = part.chunks
        ended = [span.sequence for span, token in sampled if self._stopping.append(span.sequence, token)]
        self._end(ended, report)
        for span in spans:
            if span.sequence.status is Status.PREFILLING:
                # Another rank may go on with a prompt that is done in part: its KV, too, must be in the host store.
                kv.suspend(span.sequence)
                if span.stop == span.sequence.prefill_target:
                    self.lifecycle.move(span.sequence, Status.SUSPENDED)
        self.activity.waves += 1
        self.activity.prefill_tokens += part.chunks.tokens
        self.activity.decode_tokens += len(sampled)
        self.on_progress(self.activity)
        return ended

    def _decode(self, plan: Plan, part: RankPlan, report: Report) -> list[Sequence]:
        kv = self._device.kv
        for key in part.resume:
            sequence = self.active[key] = self.sequences[key]
            kv.resume(sequence)
            self.lifecycle.move(sequence, Status.ACTIVE)
        for sequence in self.active.values():
            kv.extend(sequence, min(sequence.kv_length + plan.steps, sequence.max_length))
        if plan.partition:
            return self._decode_partitioned(plan, report)
        interval = DecodeInterval(self._forward, kv, list(self.active.values()), self._microbatch[Phase.DECODE])
        ended: list[Sequence] = []
        while report.steps < plan.steps and self.peers.any_active(interval.active):
            report.steps += 1
            if not interval.active:
                self.peers.idle_step()
                continue
            self.activity.active = interval.active
            self.activity.decode_tokens += interval.active
            now = interval.step(self._stopping.append)
            self._end(now, report)
            ended += now
            self.activity.steps += 1
            self.on_progress(self.activity)
        return ended

    def _decode_partitioned(self, plan: Plan, report: Report) -> list[Sequence]:
        """The only active sequence of the instance, if it is this rank's, with all other ranks."""
        assert self.partition is not None
        sequence = next(iter(self.active.values()), None)
        report.steps, ends = self.partition.decode(sequence, plan.steps, self._stopping.append)
        self.activity.steps += report.steps
        ended = []
        if sequence is not None:
            self.activity.active, self.activity.decode_tokens = 1, self.activity.decode_tokens + report.steps
            if ends:
                ended.append(sequence)
        self._end(ended, report)
        self.on_progress(self.activity)
        return ended

    def _end(self, sequences: list[Sequence], report: Report) -> None:
        for sequence in sequences:
            self.active.pop(sequence.id, None)
            del self.sequences[sequence.id]
            self._device.kv.drop(sequence)
            self.lifecycle.move(sequence, Status.FINISHED)
            report.finished.append(sequence.id)

    def _span(self, chunk: Chunk) -> Span:
        return Span(self.sequences[chunk.sequence], chunk.start, chunk.start + chunk.tokens)
