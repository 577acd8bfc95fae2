"""The engine of a local server, over one rank or many."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hpcgen.batch.intake import TokenizerPool
from hpcgen.cluster.coordinator import follow
from hpcgen.cluster.ending import leave_signals_to_rank_0
from hpcgen.cluster.world import World
from hpcgen.jobs.instance import InstanceOptions, open_weights, prepare
from hpcgen.jobs.place import memory_fields, place_fields
from hpcgen.server.delivery import RunSettings
from hpcgen.server.pool import Pool
from hpcgen.server.pool_events import PoolEvents
from hpcgen.server.serve import ServeOptions
from hpcgen.server.settings import Places
from hpcgen.server.store import Store


@contextmanager
def lead_local(
    world: World,
    instance: InstanceOptions,
    store: Store,
    places: Places,
    options: ServeOptions,
    say: Callable[[str], None],
) -> Iterator[Pool]:
    """The pool of rank 0. Collective."""
    prepared = prepare(world, instance)
    longest = prepared.options.max_model_len
    tokenizers = TokenizerPool(instance.model, instance.seed, longest)
    tokenizers.start()
    weights = open_weights(world, instance.model, prepared.options, say)
    events = PoolEvents(place_fields(world, prepared.options))
    engine, assembly = prepared.build_engine(world, weights, events.advanced, say)
    events.memory = memory_fields(assembly)
    decisive = {
        "seed": instance.seed,
        "max_model_len": longest,
        "dtype": str(prepared.options.dtype).removeprefix("torch."),
        "sub_batch": options.sub_batch,
    }
    settings = RunSettings(instance.model, decisive, options.sub_batch, options.limits.line_bytes)
    wave = prepared.options.expert_batch * world.size
    pool = Pool(
        engine, store, places, settings, prepared.detokenizer, tokenizers, wave,
        events=events, checkpoint_interval=options.checkpoint_interval,
    )  # fmt: skip
    try:
        with prepared.watchdog.watch():
            yield pool
        engine.stop()
        engine.close()
    finally:
        pool.close()
        assembly.device.close()


def follow_local(world: World, instance: InstanceOptions) -> None:
    """Every other rank, until rank 0 stops. Collective."""
    leave_signals_to_rank_0()
    prepared = prepare(world, instance)
    weights = open_weights(world, instance.model, prepared.options, lambda line: None)
    assembly = prepared.build_rank(world, weights)
    try:
        with prepared.watchdog.watch():
            follow(world, assembly)
        assembly.close()
    finally:
        assembly.device.close()
