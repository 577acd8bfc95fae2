"""The engine of one rank: asks the scheduler, executes its part of the plan, reports, and hands out what finished."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hpcgen.coroutine.lifecycle import Lifecycle
from hpcgen.engine.decode import DecodeInterval
from hpcgen.engine.forward import ForwardPass
from hpcgen.engine.prefill import run_wave
from hpcgen.engine.stopping import Stopping
from hpcgen.memory.device import Device
from hpcgen.memory.kv.interface import Span
from hpcgen.scheduler.admission import NeverFits
from hpcgen.scheduler.plan import Chunk, Phase, Plan, RankPlan, Report
from hpcgen.scheduler.scheduler import Scheduler
from hpcgen.sequence import Sequence, Status


@dataclass(slots=True)
class Activity:
    """What the engine has done so far, for progress and reports."""

    phase: Phase = Phase.PREFILL
    prefill_tokens: int = 0
    decode_tokens: int = 0
    waves: int = 0
    steps: int = 0
    seconds: dict[Phase, float] = field(default_factory=lambda: {Phase.PREFILL: 0.0, Phase.DECODE: 0.0})
    active: int = 0
    discarded: int = 0
    suspended: int = 0


class Engine:
    """Runs sequences to their end. `add` them, then call `step` until nothing is left."""

    def __init__(
        self,
        scheduler: Scheduler,
        device: Device,
        forward: ForwardPass,
        stopping: Stopping,
        microbatch: int,
        lifecycle: Lifecycle | None = None,
        on_progress: Callable[[Activity], None] = lambda activity: None,
    ):
        """`microbatch`: most tokens (prefill) or sequences (decode) of one attention call (`B_attn`).
        `on_progress` is called after every wave and decode step."""
        self._scheduler, self._device, self._forward = scheduler, device, forward
        self._stopping, self._microbatch, self._on_progress = stopping, microbatch, on_progress
        self.lifecycle = lifecycle or Lifecycle()
        self.activity = Activity()
        self._sequences: dict[int, Sequence] = {}
        self._active: dict[int, Sequence] = {}
        self._failed: list[Sequence] = []
        self.backlog = 0
        """Tokens that still have to be prefilled; whoever feeds the engine keeps a wave of them here."""

    @property
    def pending(self) -> int:
        """Sequences that were added and not handed out."""
        return len(self._sequences) + len(self._failed)

    def sequences(self) -> list[Sequence]:
        """The unfinished sequences, oldest first: what a checkpoint saves between two steps."""
        return [self._sequences[key] for key in sorted(self._sequences)]

    def add(self, sequence: Sequence) -> None:
        """Takes a sequence. One that can never fit fails alone, and comes out of the next `step` with its error."""
        try:
            self._scheduler.add(sequence.id, len(sequence.prompt), sequence.max_length, generated=len(sequence.output))
        except NeverFits as error:
            sequence.error = str(error)
            self.lifecycle.move(sequence, Status.FAILED)
            self._failed.append(sequence)
        else:
            self._sequences[sequence.id] = sequence
            self.backlog += sequence.prefill_target

    def step(self) -> list[Sequence]:
        """Executes one decision. Returns the sequences that ended: FINISHED, or FAILED with an `error`."""
        ended, self._failed = self._failed, []
        plan = self._scheduler.decide()
        if plan.phase is Phase.DONE:
            return ended
        start = time.perf_counter()
        part, report = plan.ranks[0], Report(rank=0)
        self._leave(part)
        self._device.enter(plan.phase)
        self.activity.phase = plan.phase
        ended += self._prefill(part, report) if plan.phase is Phase.PREFILL else self._decode(plan, part, report)
        self._scheduler.report(report)
        self.activity.seconds[plan.phase] += time.perf_counter() - start
        return ended

    def _leave(self, part: RankPlan) -> None:
        """YIELD and discard."""
        for key in part.discard:
            sequence = self._sequences[key]
            self._active.pop(key, None)
            self.backlog += sequence.kv_length
            self._device.kv.drop(sequence)
            self.lifecycle.move(sequence, Status.WAITING)
        for key in part.suspend:
            sequence = self._active.pop(key)
            self._device.kv.suspend(sequence)
            self.lifecycle.move(sequence, Status.SUSPENDED)
        self.activity.discarded += len(part.discard)
        self.activity.suspended += len(part.suspend)

    def _prefill(self, part: RankPlan, report: Report) -> list[Sequence]:
        kv = self._device.kv
        spans = [self._span(chunk) for chunk in part.chunks]
        for span in spans:
            kv.extend(span.sequence, span.stop)
            self.lifecycle.move(span.sequence, Status.PREFILLING)
        sampled = run_wave(self._forward, spans, self._microbatch, kv.microbatch_pages)
        for span in spans:
            span.sequence.kv_length = span.stop
        report.prefilled = list(part.chunks)
        ended = [span.sequence for span, token in sampled if self._stopping.append(span.sequence, token)]
        self._end(ended, report)
        for span in spans:
            if span.sequence.status is Status.PREFILLING and span.stop == span.sequence.prefill_target:
                kv.suspend(span.sequence)
                self.lifecycle.move(span.sequence, Status.SUSPENDED)
        self.activity.waves += 1
        tokens = sum(chunk.tokens for chunk in part.chunks)
        self.backlog -= tokens
        self.activity.prefill_tokens += tokens
        self.activity.decode_tokens += len(sampled)
        self._on_progress(self.activity)
        return ended

    def _decode(self, plan: Plan, part: RankPlan, report: Report) -> list[Sequence]:
        kv = self._device.kv
        for key in part.resume:
            sequence = self._active[key] = self._sequences[key]
            kv.resume(sequence)
            self.lifecycle.move(sequence, Status.ACTIVE)
        for sequence in self._active.values():
            kv.extend(sequence, min(sequence.kv_length + plan.steps, sequence.max_length))
        interval = DecodeInterval(self._forward, kv, list(self._active.values()), self._microbatch)
        ended: list[Sequence] = []
        while report.steps < plan.steps and interval.active:
            self.activity.active = interval.active
            self.activity.decode_tokens += interval.active
            now = interval.step(self._stopping.append)
            self._end(now, report)
            ended += now
            report.steps += 1
            self.activity.steps += 1
            self._on_progress(self.activity)
        return ended

    def _end(self, sequences: list[Sequence], report: Report) -> None:
        for sequence in sequences:
            self._active.pop(sequence.id, None)
            del self._sequences[sequence.id]
            self._device.kv.drop(sequence)
            self.lifecycle.move(sequence, Status.FINISHED)
            report.finished.append(sequence.id)

    def _span(self, chunk: Chunk) -> Span:
        return Span(self._sequences[chunk.sequence], chunk.start, chunk.start + chunk.tokens)
