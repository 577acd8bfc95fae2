"""Three nodes of one rank: a MIGRATE from one that is stopped is given up, the others' go on, and no page is lost."""

import os
import signal
import time

import numpy as np
import torch

from hpcgen.cluster.messages import Arrival, Departure, SequenceState
from hpcgen.cluster.migration import Migrations, Moved
from hpcgen.cluster.node_pool import open_node_pool
from hpcgen.cluster.world import open_world
from hpcgen.memory.host_store import HostStore
from tests.cluster.programs.storm import LAYOUT, _sequence

PAGES, COUNT = 32, 5
TAKES, GIVES, STOPPED = range(3)


def main() -> None:
    with open_world() as world:
        pool = open_node_pool(world, PAGES, LAYOUT.page_bytes)
        store = HostStore(LAYOUT, PAGES, pool.buffer, pool.free)
        migrations = Migrations(world, store)
        own = store.allocate(COUNT)
        store.pages[torch.tensor(own)] = world.rank + 1
        process_of, pages_of = world.gather_all(os.getpid()), world.gather_all(own)
        if world.rank == GIVES:
            migrations.start([Departure(GIVES, TAKES, own)], [])
        if world.rank == STOPPED:
            os.kill(os.getpid(), signal.SIGSTOP)
            migrations.start([Departure(STOPPED, TAKES, own)], [])
        if world.rank == TAKES:
            take(migrations, store, process_of, pages_of)
        world.wait_for_all()
        migrations.close()
        store.release(own)
        assert store.free == PAGES, "pages were lost"
        if world.leads:
            print("nothing lost", flush=True)


def take(migrations: Migrations, store: HostStore, process_of: list[int], pages_of: list[list[int]]) -> None:
    for source, patience in ((STOPPED, 1.0), (GIVES, 60.0)):
        state = SequenceState.of(_sequence(source, pages_of[source]))
        migrations.start([], [Arrival(state, source, patience)])
    ended: dict[int, Moved] = {}
    while len(ended) < 2:
        ended |= {moved.sequence: moved for moved in migrations.collect()}
        time.sleep(0.01)
    assert ended[STOPPED].pages is None, "it came from a rank that is stopped"
    arrived = ended[GIVES].pages
    assert arrived is not None
    assert np.all(store.pages[torch.tensor(arrived)].numpy() == GIVES + 1)
    store.release(arrived)
    # What was given up arrives after all: it is of no use any more.
    os.kill(process_of[STOPPED], signal.SIGCONT)


if __name__ == "__main__":
    main()
