"""`hpcgen run`: one batch from its requests to ordered results, alone or as one rank of several."""

import resource
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from hpcgen.batch.detokenization import Detokenizer
from hpcgen.batch.intake import Intake
from hpcgen.batch.reader import BatchInput
from hpcgen.batch.results import Results, check_output_path, error_path
from hpcgen.batch.run_directory import RunDirectory
from hpcgen.cluster.assemble import ClusterAssembly, build_cluster_rank, build_coordinator
from hpcgen.cluster.coordinator import Coordinator, follow
from hpcgen.cluster.ending import InterruptFlag, leave_signals_to_rank_0
from hpcgen.cluster.watchdog import Watchdog
from hpcgen.cluster.world import World, device_of_rank, open_world, threads_per_rank
from hpcgen.engine.build import EngineOptions, RankAssembly, build_engine
from hpcgen.engine.engine import Engine
from hpcgen.engine.executor import Activity
from hpcgen.engine.stopping import StopMatcher
from hpcgen.errors import HpcgenError
from hpcgen.jobs import signals
from hpcgen.jobs.totals import JobTimes, token_totals
from hpcgen.kernels.native.library import native_library
from hpcgen.model.architecture import context_length, read_config
from hpcgen.model.causal import CausalModel
from hpcgen.model.conversion.definition import target_dtype
from hpcgen.model.weight_cache import cached_weight_file
from hpcgen.model.weight_file import WeightFile
from hpcgen.report.events import EventLog
from hpcgen.report.progress import Counts, Progress
from hpcgen.report.summary import Summary
from hpcgen.scheduler.plan import Phase
from hpcgen.sequence import Sequence


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What the user asked for. Sizes in bytes; None: a default made from the model or the machine."""

    model: Path
    input: Path
    output: Path
    run_directory: Path | None = None
    seed: int = 0
    max_model_len: int | None = None
    dtype: torch.dtype | None = None
    device: str = "auto"
    device_memory: int | None = None
    host_memory: int | None = None
    attention_microbatch: int | None = None
    expert_batch: int | None = None
    sub_batch: int | None = None
    threads: int | None = None
    stall_timeout: float | None = None
    """Seconds without progress after which a job of many ranks is ended."""


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
    check_output_path(options.output)
    batch_input = BatchInput(options.input)
    prepared = _prepare(world, options)
    engine_options = prepared.options
    run_directory = RunDirectory(options.run_directory or default_run_directory(options.output))
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
        batch = _Batch(world, options, engine_options, batch_input, results, say)
        with EventLog(run_directory.events_path, requests=len(batch_input)) as events:
            world.wait_for_all()
            world.broadcast(not results.complete)
            if not results.complete:
                batch.run(prepared, events)
            counts = {name: getattr(batch.activity, name) for name in ("suspended", "discarded", "migrated")}
            events.write("finished", requests=results.finished, failed=results.failed, **counts)
        return _summarise(options, run_directory, results, batch.activity)


def _follow(world: World, options: RunOptions) -> None:
    """Every other rank."""
    leave_signals_to_rank_0()
    problem = None
    try:
        prepared = _prepare(world, options)
    except HpcgenError as error:
        problem = error  # rank 0 has the same one, and says it
    world.wait_for_all()
    work_left = world.broadcast()
    if problem is not None:
        raise problem
    if not work_left:
        return
    watchdog = Watchdog(world, options.stall_timeout)
    weights = open_weights(world, options.model, prepared.options, lambda line: None)
    assembly = prepared.build_rank(world, weights, watchdog)
    try:
        with watchdog.watch():
            follow(world, assembly.worker, watchdog)
    finally:
        assembly.device.close()


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What every rank makes of the options, before weights are read."""

    model: CausalModel
    detokenizer: Detokenizer
    options: EngineOptions

    def stop_matcher(self, sequence: Sequence) -> StopMatcher:
        return self.detokenizer.stop_matcher(sequence.sampling.stop, sequence.sampling.min_tokens)

    def build_rank(self, world: World, weights: WeightFile, watchdog: Watchdog) -> ClusterAssembly:
        return build_cluster_rank(world, self.model, weights, self.options, self.stop_matcher, watchdog)


def _prepare(world: World, options: RunOptions) -> _Prepared:
    device = _device(device_of_rank(world, options.device, torch.cuda.device_count()))
    if device.type == "cpu":
        torch.set_num_threads(threads_per_rank(world, options.threads))
    detokenizer = Detokenizer.load(options.model)
    config = read_config(options.model)[1]
    dtype = target_dtype(config, options.dtype)
    engine_options = _engine_options(options, device, dtype, _longest(options, config))
    return _Prepared(CausalModel.build(options.model, dtype, device), detokenizer, engine_options)


def open_weights(world: World, model: Path, options: EngineOptions, say: Callable[[str], None]) -> WeightFile:
    """The weight file, made at first use: by rank 0, and then on each node whose cache is its own. Collective."""
    layout, progress = weight_layout(options), ConversionProgress(say)
    path = None
    for turn in (world.leads, world.is_leader and not world.leads):
        if turn:
            path = cached_weight_file(model, options.dtype, layout, progress=progress, waiting=say)
        world.wait_for_all()
    return WeightFile(world.node_broadcast(path))


def weight_layout(options: EngineOptions) -> str:
    """The layout of the weight file that the kernels of the machine compute fastest with."""
    native = options.device.type == "cpu" and options.dtype is torch.bfloat16 and native_library() is not None
    return "packed" if native else "plain"


def default_run_directory(output: Path) -> Path:
    """results.jsonl -> results.run, beside it."""
    return output.with_suffix(".run")


class _Batch:
    """Feeds the engine with requests and the results with what it finished."""

    def __init__(
        self,
        world: World,
        options: RunOptions,
        engine_options: EngineOptions,
        batch_input: BatchInput,
        results: Results,
        say: Callable[[str], None],
    ):
        self._world, self._watchdog = world, Watchdog(world, options.stall_timeout if world.size > 1 else None)
        self._interrupt = InterruptFlag().install() if world.size > 1 else InterruptFlag()
        self._options, self._engine_options, self._input = options, engine_options, batch_input
        self._results, self._say = results, say
        self._counts = Counts(requests=len(batch_input), done=results.finished, failed=results.failed)
        self._done_tokens = 0
        self._seen = (0, 0.0)
        self.activity = Activity()

    def run(self, prepared: _Prepared, events: EventLog) -> None:
        """Until every request has a result or an error; the journal is synced whatever happens."""
        self._events = events
        intake = Intake(
            self._input,
            self._options.model,
            self._options.seed,
            self._engine_options.max_model_len,
            self._results.is_finished,
            ahead=max(512, self._wave // 2),
        )
        with intake, Progress(self._counts) as self._progress:
            intake.start()
            weights = open_weights(self._world, self._options.model, self._engine_options, self._say)
            engine, assembly = self._build(prepared, weights)
            self.activity = engine.activity
            self._describe(assembly)
            try:
                with self._watchdog.watch():
                    self._loop(intake, engine)
                engine.stop()
            finally:
                assembly.device.close()
                self._results.sync(now=True)
                self._update("finished" if self._results.complete else "stopped")

    def _build(self, prepared: _Prepared, weights: WeightFile) -> tuple[Engine | Coordinator, RankAssembly]:
        if self._world.size > 1:
            rank = prepared.build_rank(self._world, weights, self._watchdog)
            return build_coordinator(self._world, rank, self._watchdog, self._advanced), rank
        alone = build_engine(
            prepared.model, weights, self._engine_options, prepared.stop_matcher, on_progress=self._advanced
        )
        return alone.engine, alone

    @property
    def _wave(self) -> int:
        """Tokens of a wave of all ranks."""
        return self._engine_options.expert_batch * self._world.size

    def _loop(self, intake: Intake, engine: Engine | Coordinator) -> None:
        while True:
            while engine.backlog < self._wave:
                # With few sequences in hand, a full wave is worth a wait for the tokenizer.
                with self._watchdog.waiting("requests that the tokenizer works on"):
                    item = intake.take(block=engine.pending < self._wave // 2)
                if item is None:
                    break
                if item.error is not None:
                    self._results.fail(item.request, item.error)
                for sequence in item.sequences:
                    engine.add(sequence)
            if not engine.pending and intake.exhausted:
                return
            self._stop_where_asked(engine)
            for sequence in engine.step():
                self._finish(sequence)

    def _stop_where_asked(self, engine: Engine | Coordinator) -> None:
        """Between two decisions all ranks are at the same place and can end in good order."""
        if self._interrupt.requested or signals.current().requested:
            engine.stop()
            if self._interrupt.requested:
                raise KeyboardInterrupt
            signals.current().check()

    def _finish(self, sequence: Sequence) -> None:
        self._done_tokens += len(sequence.output)
        self._results.finish(sequence)

    def _advanced(self, activity: Activity) -> None:
        """After every wave and step."""
        tokens = activity.prefill_tokens + activity.decode_tokens
        now = time.perf_counter()
        seen_tokens, seen_time = self._seen
        self._events.step(activity.phase.value, tokens - seen_tokens, now - seen_time if seen_time else 0.0)
        self._seen = (tokens, now)
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
            device_budget=assembly.budget.limit,
            phases={phase.value: asdict(memory) for phase, memory in (assembly.phases or {}).items()},
        )


class ConversionProgress:
    """Shows the conversion of a checkpoint, at most every few seconds."""

    def __init__(self, say: Callable[[str], None], interval: float = 5.0):
        self._say, self._interval, self._next = say, interval, 0.0

    def __call__(self, written: int, total: int, name: str) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self._interval
            self._say(f"converting the model: {written / max(total, 1):.0%} of {total / 2**30:,.2f} GiB ({name})")


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise HpcgenError(f"There is no device {name!r}; use cpu, cuda, cuda:N or auto.") from None
    if device.type not in ("cpu", "cuda"):
        raise HpcgenError(f"Device {name!r} is not supported; use cpu, cuda, cuda:N or auto.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise HpcgenError("There is no CUDA device, or this torch is built without CUDA; use --device cpu.")
    return device


def _engine_options(options: RunOptions, device: torch.device, dtype: torch.dtype, longest: int) -> EngineOptions:
    chosen = {
        name: getattr(options, name)
        for name in ("device_memory", "host_memory", "attention_microbatch", "expert_batch")
        if getattr(options, name) is not None
    }
    return EngineOptions(max_model_len=longest, dtype=dtype, device=device, tokenizer_directory=options.model, **chosen)


def _longest(options: RunOptions, config: PreTrainedConfig) -> int:
    """Most tokens of a sequence: what the user wants, or else what the model was made for."""
    if options.max_model_len is None:
        return context_length(config)
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    if isinstance(context, int) and options.max_model_len > context:
        raise HpcgenError(
            f"--max-model-len {options.max_model_len} is more than the model's context, {context} tokens."
        )
    return options.max_model_len


def _summarise(options: RunOptions, run_directory: RunDirectory, results: Results, activity: Activity) -> Summary:
    """Writes the outputs, then the success marker, and says what came of the run."""
    counts = results.write_outputs(options.output)
    tokens = token_totals(results.journal)
    jobs = JobTimes.read(run_directory.events_path)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss + resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    summary = Summary(
        requests_ok=counts.completed,
        requests_failed=counts.failed,
        prompt_tokens=tokens.prompt,
        output_tokens=tokens.output,
        bct=jobs.seconds,
        prefill_seconds=activity.seconds[Phase.PREFILL],
        decode_seconds=activity.seconds[Phase.DECODE],
        peak_memory=memory * 1024,
        output=options.output,
        errors=error_path(options.output),
        run_directory=run_directory.path,
        scts=jobs.since_start(results.sub_batches.completion_times()) if results.sub_batches else (),
        resumed=jobs.count - 1,
    )
    run_directory.mark_complete({"requests_ok": counts.completed, "requests_failed": counts.failed, "bct": summary.bct})
    return summary
