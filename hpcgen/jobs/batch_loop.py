"""The loop of a run, on rank 0: requests to the engine, what it finished to the results, until there are none."""

import time
from collections.abc import Callable
from dataclasses import asdict

from hpcgen.batch.intake import Intake, IntakeError, IntakeItem
from hpcgen.batch.reader import BatchInput
from hpcgen.batch.results import Results
from hpcgen.batch.run_directory import RunDirectory
from hpcgen.checkpoint.manifest import epochs
from hpcgen.cluster.coordinator import Coordinator
from hpcgen.cluster.ending import InterruptFlag
from hpcgen.cluster.health import HealthRecord
from hpcgen.cluster.world import World
from hpcgen.engine.build import EngineOptions
from hpcgen.engine.engine import Engine
from hpcgen.engine.executor import Activity
from hpcgen.jobs import signals
from hpcgen.jobs.checkpoint_nodes import nodes_of
from hpcgen.jobs.instance import Prepared, open_weights
from hpcgen.jobs.place import memory_fields
from hpcgen.jobs.recovery import Recovery, prefill_rate
from hpcgen.jobs.run_options import RunOptions
from hpcgen.jobs.share import Share
from hpcgen.planner.defaults import RunPlan
from hpcgen.report.events import EventLog
from hpcgen.report.progress import Counts, Progress
from hpcgen.sequence import Sequence

LOAD_SECONDS = 2.0
"""Between two records of where the sequences stand."""
IDLE_SECONDS = 0.5
"""Between two looks at whether there is something to do again."""


class BatchLoop:
    """Feeds the engine with requests and the results with what it finished."""

    def __init__(
        self,
        world: World,
        options: RunOptions,
        engine_options: EngineOptions,
        batch_input: BatchInput,
        run_directory: RunDirectory,
        results: Results,
        share: Share,
        say: Callable[[str], None],
    ):
        self._world = world
        self._interrupt = InterruptFlag().install()
        self._options, self._engine_options, self._input = options, engine_options, batch_input
        self._run_directory, self._results, self._share, self._say = run_directory, results, share, say
        self._taken: set[int] = set()
        """Requests whose sequences the engine has."""
        self._counts = Counts(requests=len(batch_input), done=results.finished, failed=results.failed)
        self._done_tokens = 0
        self._seen = (0, 0.0)
        self._next_load = 0.0
        self._ended = self._waits = False
        self.activity = Activity()

    def run(self, prepared: Prepared, events: EventLog, plan: RunPlan | None) -> None:
        """Until every request has a result or an error; the journal is synced whatever happens."""
        self._events = events
        checkpoints = self._run_directory.checkpoints
        intake = Intake(
            self._input,
            self._options.model,
            self._options.seed,
            self._engine_options.max_model_len,
            lambda request: not self._results.is_wanted(request) or request in self._taken,
            range(0),
            ahead=max(512, self._wave // 2),
        )
        self._share.supply(intake)
        with intake, Progress(self._counts) as self._progress:
            if not epochs(checkpoints):
                intake.start()
            weights = open_weights(self._world, self._options.model, self._engine_options, self._say)
            engine, assembly = prepared.build_engine(self._world, weights, self._advanced, self._lost)
            self._watchdog = prepared.watchdog
            self._engine, self.activity = engine, engine.activity
            self._seen = (0, time.perf_counter())
            self._events.write("memory", **memory_fields(assembly))
            self._recovery = Recovery(
                checkpoints,
                nodes_of(self._world, engine, assembly, checkpoints),
                interval=self._options.checkpoint_interval,
                events=self._events,
                say=self._say,
            )
            try:
                with self._watchdog.watch():
                    rate = prefill_rate(self._run_directory.events_path)
                    if rate is None and plan is not None:
                        rate = plan.prefill_rate / self._world.size
                    self._taken |= self._recovery.restore(engine, self._results, rate)
                    self._loop(intake, engine)
                    self._ended = True
                engine.stop()
                engine.close()
            finally:
                self._recovery.close()
                assembly.device.close()
                self._results.sync(now=True)
                self._update("finished" if self._ended else "stopped")

    @property
    def _wave(self) -> int:
        """Tokens of a wave of all ranks."""
        return self._engine_options.expert_batch * self._world.size

    @property
    def _batch(self) -> int:
        """Sequences that all ranks decode at once."""
        return self._engine_options.most_active * self._world.size

    def _loop(self, intake: Intake, engine: Engine | Coordinator) -> None:
        while True:
            while engine.backlog < self._wave and self._share.wants_more(engine.pending, self._batch):
                # With few sequences in hand, a full wave is worth a wait for the tokenizer.
                with self._watchdog.waiting("requests that the tokenizer works on"):
                    item = self._take(intake, engine)
                if item is None:
                    break
                if item.error is not None:
                    self._results.fail(item.request, item.error)
                else:
                    self._taken.add(item.request)
                for sequence in item.sequences:
                    engine.add(sequence)
            if not engine.pending and intake.exhausted:
                self._results.sync(now=True)
                if self._share.over:
                    return
                self._idle(engine)
            self._stop_where_asked(engine)
            self._drop_lost(engine)
            self._recovery.save_if_due(engine, self._results)
            for sequence in engine.step():
                self._finish(sequence)

    def _take(self, intake: Intake, engine: Engine | Coordinator) -> IntakeItem | None:
        while True:
            self._share.supply(intake)
            for checkpoints, requests in self._share.inherited():
                self._taken |= self._recovery.inherit(engine, self._results, checkpoints, set(requests) - self._taken)
            try:
                item = intake.take(engine.pending < self._wave // 2)
            except IntakeError:
                # What killed the worker may have been a signal to the whole job: then it is a stop and no failure.
                signals.current().check()
                raise
            if item is None:
                return None
            if self._results.is_wanted(item.request) and item.request not in self._taken:  # else a lease was lost
                self._share.note_begun(item.request)
                return item

    def _drop_lost(self, engine: Engine | Coordinator) -> None:
        for requests in self._share.lost():
            self._say(f"another instance has taken over lines {requests[0] + 1:,} to {requests[-1] + 1:,}")
            engine.cancel([sequence.id for sequence in engine.sequences() if sequence.request in requests])
            self._results.forget(requests)
            self._taken.difference_update(requests)

    def _idle(self, engine: Engine | Coordinator) -> None:
        """Other instances work on what is left, and one of them may die."""
        if not self._waits:
            self._waits = True
            self._say(
                "nothing is free: waiting for what other instances have leased; what one does not finish can be taken "
                f"over {self._options.lease_expiry:.0f} s after its last sign of life"
            )
        with self._watchdog.waiting("sub-batches of other instances"):
            time.sleep(IDLE_SECONDS)
        if isinstance(engine, Coordinator):
            engine.ask([None] * engine.ranks)  # so that other ranks know that this one lives

    def _stop_where_asked(self, engine: Engine | Coordinator) -> None:
        """Between two decisions all ranks are at the same place and can end in good order."""
        stop = signals.current()
        if self._interrupt.requested or stop.requested:
            deadline = stop.deadline(self._options.grace) if stop.requested else None
            self._recovery.save_before_leaving(engine, self._results, deadline)
            self._share.leave()
            self._events.write("stopped", by=stop.name or "SIGINT")
            engine.stop()
            engine.close()
            if self._interrupt.requested:
                raise KeyboardInterrupt
            stop.check()

    def _finish(self, sequence: Sequence) -> None:
        self._done_tokens += len(sequence.output)
        self._results.finish(sequence)
        if not self._results.is_wanted(sequence.request):
            self._taken.discard(sequence.request)

    def _advanced(self, activity: Activity) -> None:
        """After every wave and step."""
        tokens = activity.prefill_tokens + activity.decode_tokens
        now = time.perf_counter()
        seen_tokens, seen_time = self._seen
        self._events.step(activity.phase.value, tokens - seen_tokens, now - seen_time)
        self._seen = (tokens, now)
        if now >= self._next_load:
            self._next_load = now + LOAD_SECONDS
            self._events.write("load", **asdict(self._engine.load), migrated=activity.migrated)
            if isinstance(self._engine, Coordinator):
                self._note_health(self._engine.health)
        self._results.sync()
        self._update(activity.phase.value)

    def _note_health(self, health: HealthRecord) -> None:
        self._events.write("health", ranks=[rank._asdict() for rank in health.ranks()])
        for trouble in health.troubles():
            self._say(f"warning: {trouble}")

    def _lost(self, line: str) -> None:
        """Some ranks are gone, and the others go on."""
        self._say(f"warning: {line}")
        self._events.write("ranks_lost", what=line, ranks=self._world.size, hosts=list(self._world.hosts))

    def _update(self, phase: str) -> None:
        self._progress.update(
            Counts(
                requests=len(self._input),
                done=min(self._results.finished + self._share.elsewhere, len(self._input)),
                failed=self._results.failed,
                output_tokens=self.activity.decode_tokens,
                done_tokens=self._done_tokens,
                phase=phase,
            )
        )
