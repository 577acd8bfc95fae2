"""`hpcgen run`: one batch from its requests to ordered results, alone or as one rank of several."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from hpcgen.batch.parquet import is_parquet
from hpcgen.batch.reader import BatchInput
from hpcgen.batch.results import Results, check_output_path
from hpcgen.batch.run_directory import RunDirectory
from hpcgen.batch.source import open_source
from hpcgen.cluster.coordinator import follow
from hpcgen.cluster.ending import leave_signals_to_rank_0
from hpcgen.cluster.world import World, open_world
from hpcgen.errors import HpcgenError
from hpcgen.jobs import signals
from hpcgen.jobs.batch_loop import BatchLoop
from hpcgen.jobs.checkpoint_nodes import RankTasks
from hpcgen.jobs.delivery import Delivery
from hpcgen.jobs.instance import open_weights, prepare
from hpcgen.jobs.leases import Leases
from hpcgen.jobs.place import place_fields
from hpcgen.jobs.planning import follow_plan
from hpcgen.jobs.planning import plan as make_plan
from hpcgen.jobs.run_options import RunOptions
from hpcgen.jobs.share import LeasedShare, Share, WholeInput, default_sub_batch
from hpcgen.report.events import EventLog
from hpcgen.report.summary import Summary


def run(options: RunOptions, say: Callable[[str], None]) -> Summary | None:
    """Runs the batch, or continues it where its run directory says. `say` shows a line to the user.

    Started by mpirun or srun it is one rank of several; those other than rank 0 return None, as does an instance whose
    results another one has merged.
    Raises HpcgenError for what the user can mend, before any work where that can be known.
    """
    with open_world() as world:
        if world.leads:
            return _lead(world, options, say)
        _follow(world, options)
        return None


def _lead(world: World, options: RunOptions, say: Callable[[str], None]) -> Summary | None:
    """Rank 0, or the only one."""
    stop = signals.current()
    run_directory = RunDirectory(options.run_directory or default_run_directory(options.output), options.instance)
    check_output_path(options.output, (options.input, run_directory.path))
    is_parquet(options.output)  # raises where it could not be written at the end
    source = open_source(options.input, run_directory.own, options.template)
    batch_input = BatchInput(source.requests)
    prepared = prepare(world, options)
    engine_options = prepared.options
    sub_batch = _sub_batch(options, run_directory, len(batch_input))
    decisive = {
        "seed": options.seed,
        "max_model_len": engine_options.max_model_len,
        "dtype": str(engine_options.dtype).removeprefix("torch."),
        "sub_batch": sub_batch,
    }
    with ExitStack() as stack:
        stack.enter_context(run_directory.open(batch_input, options.model, decisive))
        share: Share = WholeInput(len(batch_input))
        if sub_batch is not None and options.instance is not None:
            leases = Leases(run_directory.leases, options.instance, options.lease_expiry)
            stack.enter_context(leases.open(len(batch_input), sub_batch))
            share = LeasedShare(leases, run_directory, options.lease_ahead)
        results = Results(
            run_directory, batch_input, prepared.detokenizer, sub_batch, owns=share.owns, claim=share.claim
        )
        share.begin(results)
        if results.finished:
            say(f"continuing {run_directory.path}: {results.finished:,} of {len(batch_input):,} requests are finished")
        where = place_fields(world, engine_options)
        with EventLog(run_directory.events_path, requests=len(batch_input), **where) as events:
            work_left = share.wait_for_work(stop.check)
            world.wait_for_all()
            plan = None
            if work_left:
                plan = make_plan(world, options, prepared, batch_input, run_directory.plan_path, events, say)
            world.broadcast((run_directory.checkpoints if work_left else None, plan))
            prepared = follow_plan(prepared, plan)
            batch = BatchLoop(world, options, prepared.options, batch_input, run_directory, results, share, say)
            if work_left:
                batch.run(prepared, events, plan)
            counts = {name: getattr(batch.activity, name) for name in ("suspended", "discarded", "migrated")}
            events.write("finished", requests=results.finished, failed=results.failed, **counts)
        results.sync(now=True)
        delivery = Delivery(options.output, source, run_directory)
        if isinstance(share, LeasedShare):
            return delivery.merge(share.leases, batch.activity, stop.check, say)
        return delivery.deliver(results.journal, results.sub_batches, batch.activity)


def _sub_batch(options: RunOptions, run_directory: RunDirectory, requests: int) -> int | None:
    """Requests of a sub-batch. A shared run is always divided: as the user says, as it was begun, or by default."""
    if options.sub_batch is not None or options.instance is None:
        return options.sub_batch
    if run_directory.manifest_path.exists():
        return run_directory.read_manifest().options.get("sub_batch")
    return default_sub_batch(requests)


def _follow(world: World, options: RunOptions) -> None:
    """Every other rank."""
    leave_signals_to_rank_0()
    problem = None
    try:
        prepared = prepare(world, options)
    except HpcgenError as error:
        problem = error  # rank 0 has the same one, and says it
    world.wait_for_all()
    checkpoints, plan = world.broadcast()
    if problem is not None:
        raise problem
    if checkpoints is None:
        return
    prepared = follow_plan(prepared, plan)
    weights = open_weights(world, options.model, prepared.options, lambda line: None)
    assembly = prepared.build_rank(world, weights)
    tasks = RankTasks(world, assembly, checkpoints)
    try:
        with prepared.watchdog.watch():
            follow(world, assembly)
        assembly.close()
    finally:
        tasks.close()
        assembly.device.close()


def default_run_directory(output: Path) -> Path:
    """results.jsonl -> results.run, beside it."""
    return output.with_suffix(".run")
