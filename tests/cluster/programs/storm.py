"""Two nodes of one rank exchange thousands of sequences while both compute; every byte is verified at its new place.

Each round, each node sends as many sequences as the other; pages are filled by (round, sequence, page). Arguments:
rounds, most sequences a round.
"""

import sys
import threading
import time
import zlib
from array import array

import numpy as np
import torch

from hpcgen.cluster.messages import Arrival, Departure, SequenceState
from hpcgen.cluster.migration import Migrations
from hpcgen.cluster.node_pool import open_node_pool
from hpcgen.cluster.world import World, open_world
from hpcgen.kernels.attention.kv_layout import KVLayout
from hpcgen.memory.host_store import HostStore
from hpcgen.sequence import SamplingParams, Sequence, Status

LAYOUT = KVLayout(2, 2, 8, 2, 8, torch.bfloat16)
PAGES = 256


_NOISE = np.random.default_rng(0).integers(0, 256, LAYOUT.page_bytes + 65536, dtype=np.uint8)


def content(sequence: int, page: int) -> np.ndarray:
    """Bytes that no other page has: noise from another place."""
    start = (sequence * 8 + page) % 65536
    return _NOISE[start : start + LAYOUT.page_bytes]


def main(rounds: int, most: int) -> None:
    with open_world() as world:
        assert world.nodes == world.size == 2
        pool = open_node_pool(world, PAGES, LAYOUT.page_bytes)
        store = HostStore(LAYOUT, PAGES, pool.buffer, pool.free)
        migrations = Migrations(world, store)
        stop = threading.Event()
        computing = threading.Thread(target=compute, args=(stop,))
        computing.start()
        verified = sum(exchange(world, store, migrations, index, most) for index in range(rounds))
        stop.set()
        computing.join()
        assert store.free == PAGES, "pages were lost"
        migrations.close()
        print(f"rank {world.rank}: {verified} sequences arrived", flush=True)


def compute(stop: threading.Event) -> None:
    """What decode does to the other end: no MPI, and the interpreter taken now and then."""
    matrix = np.ones((192, 192), np.float32)
    while not stop.is_set():
        matrix @ matrix
        sum(range(2000))


def exchange(world: World, store: HostStore, migrations: Migrations, index: int, most: int) -> int:
    """One round; gives how many sequences arrived here."""
    random = np.random.default_rng(index)
    going, coming = [], []
    for number in range(int(random.integers(1, most + 1))):
        for source in range(2):
            count = int(random.integers(1, 9))
            key = (index * most + number) * 2 + source
            going += [(key, count)] if source == world.rank else []
            coming += [(key, count)] if source != world.rank else []
    departures = []
    for key, count in going:
        pages = store.allocate(count)
        for place, page in enumerate(pages):
            store.pages[page] = torch.from_numpy(content(key, place))
        departures.append(Departure(key, 1 - world.rank, pages))
    theirs = dict(world.gather_all({d.sequence: d.pages for d in departures})[1 - world.rank])
    arrivals = [Arrival(SequenceState.of(_sequence(key, theirs[key])), 1 - world.rank, 60.0) for key, _ in coming]
    migrations.start(departures, arrivals)
    arrived = []
    while len(arrived) < len(coming):
        arrived += migrations.collect()
        time.sleep(0.001)
    for key, pages in arrived:
        assert pages is not None, f"sequence {key} was lost"
        for place, page in enumerate(pages):
            assert zlib.crc32(store.pages[page].numpy()) == zlib.crc32(content(key, place)), (key, place)
        store.release(pages)
    world.wait_for_all()
    for departure in departures:
        store.release(departure.pages)
    return len(arrived)


def _sequence(key: int, pages: list[int]) -> Sequence:
    return Sequence(
        key, key, 0, array("I", [1]), SamplingParams(max_tokens=1), status=Status.SUSPENDED, kv_length=1, pages=pages
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
