"""`hpcgen run`: one batch from its requests to ordered results, alone or as one rank of several."""

import os
import resource
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpcgen.batch.intake import Intake, IntakeError, IntakeItem
from hpcgen.batch.parquet import is_parquet, write_parquet
from hpcgen.batch.reader import BatchInput
from hpcgen.batch.results import OutputError, Results, check_output_path, error_path
from hpcgen.batch.run_directory import RunDirectory
from hpcgen.batch.source import Source, TemplateOptions, open_source
from hpcgen.checkpoint.manifest import epochs
from hpcgen.cluster.assemble import ClusterAssembly
from hpcgen.cluster.coordinator import Coordinator, follow
from hpcgen.cluster.ending import InterruptFlag, leave_signals_to_rank_0
from hpcgen.cluster.world import World, open_world
from hpcgen.engine.build import EngineOptions, RankAssembly
from hpcgen.engine.engine import Engine
from hpcgen.engine.executor import Activity
from hpcgen.errors import HpcgenError
from hpcgen.jobs import signals
from hpcgen.jobs.checkpoint_nodes import RankTasks, nodes_of
from hpcgen.jobs.instance import InstanceOptions, Prepared, open_weights, prepare
from hpcgen.jobs.planning import follow_plan
from hpcgen.jobs.planning import plan as make_plan
from hpcgen.jobs.recovery import Recovery, prefill_rate
from hpcgen.jobs.totals import CheckpointCost, JobTimes, token_totals
from hpcgen.planner.defaults import RunPlan
from hpcgen.report.events import EventLog
from hpcgen.report.progress import Counts, Progress
from hpcgen.report.summary import Summary
from hpcgen.scheduler.plan import Phase
from hpcgen.sequence import Sequence

LOAD_SECONDS = 2.0
"""Between two records of where the sequences stand."""


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


def run(options: RunOptions, say: Callable[[str], None]) -> Summary | None:
    """Runs the batch, or continues it where its run directory says. `say` shows a line to the user.

    Started by mpirun or srun it is one rank of several; those other than rank 0 return None.
    Raises HpcgenError for what the user can mend, before any work where that can be known.
    """
    with open_world() as world:
        if world.leads:
            return _lead(world, options, say)
        _follow(world, options)
        return None


def _lead(world: World, options: RunOptions, say: Callable[[str], None]) -> Summary:
    """Rank 0, or the only one."""
    signals.current()
    run_directory = RunDirectory(options.run_directory or default_run_directory(options.output))
    check_output_path(options.output, (options.input, run_directory.path))
    is_parquet(options.output)  # raises where it could not be written at the end
    source = open_source(options.input, run_directory.path, options.template)
    batch_input = BatchInput(source.requests)
    prepared = prepare(world, options)
    engine_options = prepared.options
    decisive = {
        "seed": options.seed,
        "max_model_len": engine_options.max_model_len,
        "dtype": str(engine_options.dtype).removeprefix("torch."),
        "sub_batch": options.sub_batch,
    }
    with run_directory.open(batch_input, options.model, decisive):
        results = Results(run_directory, batch_input, prepared.detokenizer, options.sub_batch)
        if results.finished:
            say(f"continuing {run_directory.path}: {results.finished:,} of {len(batch_input):,} requests are finished")
        place = _place(world, engine_options)
        with EventLog(run_directory.events_path, requests=len(batch_input), **place) as events:
            world.wait_for_all()
            plan = None
            if not results.complete:
                plan = make_plan(world, options, prepared, batch_input, run_directory.plan_path, events, say)
            world.broadcast((not results.complete, plan))
            prepared = follow_plan(prepared, plan)
            batch = _Batch(world, options, prepared.options, batch_input, run_directory, results, say)
            if not results.complete:
                batch.run(prepared, events, plan)
            counts = {name: getattr(batch.activity, name) for name in ("suspended", "discarded", "migrated")}
            events.write("finished", requests=results.finished, failed=results.failed, **counts)
        return _summarise(options, source, run_directory, results, batch.activity)


def _follow(world: World, options: RunOptions) -> None:
    """Every other rank."""
    leave_signals_to_rank_0()
    problem = None
    try:
        prepared = prepare(world, options)
    except HpcgenError as error:
        problem = error  # rank 0 has the same one, and says it
    world.wait_for_all()
    work_left, plan = world.broadcast()
    if problem is not None:
        raise problem
    if not work_left:
        return
    prepared = follow_plan(prepared, plan)
    weights = open_weights(world, options.model, prepared.options, lambda line: None)
    assembly = prepared.build_rank(world, weights)
    run_directory = RunDirectory(options.run_directory or default_run_directory(options.output))
    tasks = RankTasks(world, assembly, run_directory.checkpoints)
    try:
        with prepared.watchdog.watch():
            follow(world, assembly.worker)
        assembly.worker.close()
    finally:
        tasks.close()
        assembly.device.close()


def default_run_directory(output: Path) -> Path:
    """results.jsonl -> results.run, beside it."""
    return output.with_suffix(".run")


def _place(world: World, options: EngineOptions) -> dict[str, Any]:
    """Where this job runs, for reports."""
    place = {"ranks": world.size, "hosts": list(world.hosts), "device": options.device.type}
    job = os.environ.get("SLURM_JOB_ID")
    return place | ({"job": job} if job else {})


class _Batch:
    """Feeds the engine with requests and the results with what it finished."""

    def __init__(
        self,
        world: World,
        options: RunOptions,
        engine_options: EngineOptions,
        batch_input: BatchInput,
        run_directory: RunDirectory,
        results: Results,
        say: Callable[[str], None],
    ):
        self._world = world
        self._interrupt = InterruptFlag().install()
        self._options, self._engine_options, self._input = options, engine_options, batch_input
        self._run_directory, self._results, self._say = run_directory, results, say
        self._counts = Counts(requests=len(batch_input), done=results.finished, failed=results.failed)
        self._done_tokens = 0
        self._seen = (0, 0.0)
        self._next_load = 0.0
        self.activity = Activity()

    def run(self, prepared: Prepared, events: EventLog, plan: RunPlan | None) -> None:
        """Until every request has a result or an error; the journal is synced whatever happens."""
        self._events = events
        checkpoints = self._run_directory.checkpoints
        restored: set[int] = set()
        intake = Intake(
            self._input,
            self._options.model,
            self._options.seed,
            self._engine_options.max_model_len,
            lambda request: self._results.is_finished(request) or request in restored,
            ahead=max(512, self._wave // 2),
        )
        with intake, Progress(self._counts) as self._progress:
            if not epochs(checkpoints):
                intake.start()
            weights = open_weights(self._world, self._options.model, self._engine_options, self._say)
            engine, assembly = prepared.build_engine(self._world, weights, self._advanced)
            self._watchdog = prepared.watchdog
            self._engine, self.activity = engine, engine.activity
            self._seen = (0, time.perf_counter())
            self._describe(assembly)
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
                        rate = plan.prefill_rate / self._world.nodes
                    restored |= self._recovery.restore(engine, self._results, rate)
                    self._loop(intake, engine)
                engine.stop()
                engine.close()
            finally:
                self._recovery.close()
                assembly.device.close()
                self._results.sync(now=True)
                self._update("finished" if self._results.complete else "stopped")

    @property
    def _wave(self) -> int:
        """Tokens of a wave of all ranks."""
        return self._engine_options.expert_batch * self._world.size

    def _loop(self, intake: Intake, engine: Engine | Coordinator) -> None:
        while True:
            while engine.backlog < self._wave:
                # With few sequences in hand, a full wave is worth a wait for the tokenizer.
                with self._watchdog.waiting("requests that the tokenizer works on"):
                    item = self._take(intake, engine.pending < self._wave // 2)
                if item is None:
                    break
                if item.error is not None:
                    self._results.fail(item.request, item.error)
                for sequence in item.sequences:
                    engine.add(sequence)
            if not engine.pending and intake.exhausted:
                return
            self._stop_where_asked(engine)
            self._recovery.save_if_due(engine, self._results)
            for sequence in engine.step():
                self._finish(sequence)

    @staticmethod
    def _take(intake: Intake, block: bool) -> IntakeItem | None:
        try:
            return intake.take(block)
        except IntakeError:
            # What killed the worker may have been a signal to the whole job: then it is a stop and no failure.
            signals.current().check()
            raise

    def _stop_where_asked(self, engine: Engine | Coordinator) -> None:
        """Between two decisions all ranks are at the same place and can end in good order."""
        stop = signals.current()
        if self._interrupt.requested or stop.requested:
            deadline = stop.deadline(self._options.grace) if stop.requested else None
            self._recovery.save_before_leaving(engine, self._results, deadline)
            engine.stop()
            engine.close()
            if self._interrupt.requested:
                raise KeyboardInterrupt
            stop.check()

    def _finish(self, sequence: Sequence) -> None:
        self._done_tokens += len(sequence.output)
        self._results.finish(sequence)

    def _advanced(self, activity: Activity) -> None:
        """After every wave and step."""
        tokens = activity.prefill_tokens + activity.decode_tokens
        now = time.perf_counter()
        seen_tokens, seen_time = self._seen
        self._events.step(activity.phase.value, tokens - seen_tokens, now - seen_time)
        self._seen = (tokens, now)
        if now >= self._next_load:
            self._next_load = now + LOAD_SECONDS
            self._events.write("load", **asdict(self._engine.load))
        self._results.sync()
        self._update(activity.phase.value)

    def _update(self, phase: str) -> None:
        self._progress.update(
            Counts(
                requests=len(self._input),
                done=self._results.finished,
                failed=self._results.failed,
                output_tokens=self.activity.decode_tokens,
                done_tokens=self._done_tokens,
                phase=phase,
            )
        )

    def _describe(self, assembly: RankAssembly) -> None:
        store, layout = assembly.store, assembly.model.kv_layout
        self._events.write(
            "memory",
            host_pages=store.count,
            page_bytes=layout.page_bytes,
            backed_by=assembly.pool.kind if isinstance(assembly, ClusterAssembly) else None,
            device_budget=assembly.budget.limit,
            phases={phase.value: asdict(memory) for phase, memory in (assembly.phases or {}).items()},
        )


def _write_outputs(options: RunOptions, source: Source, results: Results) -> Path:
    """Results in the form that the output's name asks for. Returns where the errors are."""
    if not is_parquet(options.output):
        results.write_outputs(options.output)
        return error_path(options.output)
    results.sync(now=True)
    try:
        write_parquet(results.journal, source.table, options.output)
    except OSError as error:
        raise OutputError(f"cannot write the output {options.output}: {error.strerror}") from None
    return options.output


def _summarise(
    options: RunOptions, source: Source, run_directory: RunDirectory, results: Results, activity: Activity
) -> Summary:
    """Writes the outputs, then the success marker, and says what came of the run."""
    errors = _write_outputs(options, source, results)
    completed, failed = results.finished - results.failed, results.failed
    tokens = token_totals(results.journal)
    jobs = JobTimes.read(run_directory.events_path)
    checkpoints = CheckpointCost.read(run_directory.events_path)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss + resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    summary = Summary(
        requests_ok=completed,
        requests_failed=failed,
        prompt_tokens=tokens.prompt,
        output_tokens=tokens.output,
        bct=jobs.seconds,
        prefill_seconds=activity.seconds[Phase.PREFILL],
        decode_seconds=activity.seconds[Phase.DECODE],
        peak_memory=memory * 1024,
        output=options.output,
        errors=errors,
        run_directory=run_directory.path,
        scts=jobs.since_start(results.sub_batches.completion_times()) if results.sub_batches else (),
        resumed=jobs.count - 1,
        checkpoints=checkpoints.count,
        checkpoint_stall=checkpoints.stall,
    )
    for file in run_directory.checkpoints.iterdir():  # what they held is in the results
        file.unlink(missing_ok=True)
    run_directory.mark_complete({"requests_ok": completed, "requests_failed": failed, "bct": summary.bct})
    return summary
