"""Bandwidth of MIGRATE beside memcpy, with both ends idle and both computing: `python results/migration.py`.

Starts two ranks on two nodes by name, first over shared memory, then with MPI kept from using it.
"""

import argparse
import os
import subprocess
import sys
import threading
import time
from array import array
from pathlib import Path

import numpy as np
import torch

from hpcgen.cluster.messages import Arrival, Departure, SequenceState
from hpcgen.cluster.migration import Migrations
from hpcgen.cluster.node_pool import open_node_pool
from hpcgen.cluster.world import NODE_NAME, World, open_world
from hpcgen.kernels.attention.kv_layout import KVLayout
from hpcgen.memory.host_store import HostStore
from hpcgen.sequence import SamplingParams, Sequence, Status

# A page of 28 layers of 4 KV heads of 128: 3.5 MiB.
LAYOUT = KVLayout(28, 4, 128, 4, 128, torch.bfloat16)
SEQUENCES, PAGES = 16, 4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--model", help="not used")
    arguments = parser.parse_args()
    if arguments.rank:
        with open_world() as world:
            measure(world)
        return
    for network in (False, True):
        rank = [sys.executable, __file__, "--rank"]
        command = [str(Path(sys.executable).with_name("mpirun"))]
        command += ["-n", "1", "-env", NODE_NAME, "a", *rank, ":", "-n", "1", "-env", NODE_NAME, "b", *rank]
        print("through the network" if network else "through shared memory", flush=True)
        extra = {"MPIR_CVAR_NOLOCAL": "1"} if network else {}
        subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1", **extra}, check=True)


def measure(world: World) -> None:
    torch.set_num_threads(1)
    count = 2 * SEQUENCES * PAGES
    pool = open_node_pool(world, count, LAYOUT.page_bytes)
    pool.buffer[:] = world.rank + 1
    store = HostStore(LAYOUT, count, pool.buffer, pool.free)
    migrations = Migrations(world, store)
    move(world, store, migrations)
    for name, busy in (("idle", False), ("computing", True)):
        stop = threading.Event()
        thread = threading.Thread(target=compute, args=(stop,))
        if busy:
            thread.start()
        rates = [move(world, store, migrations) for _ in range(3)]
        stop.set()
        if busy:
            thread.join()
        if world.leads:
            runs = ", ".join(f"{rate:.2f}" for rate in rates)
            print(f"  MIGRATE, both ends {name}: {max(rates):.2f} GiB/s (3 runs: {runs})")
    if world.leads:
        half = len(pool.buffer) // 2
        source, destination = pool.buffer[:half], pool.buffer[half : 2 * half]
        begin = time.perf_counter()
        destination.copy_(source)
        print(f"  memcpy: {half / (time.perf_counter() - begin) / 2**30:.2f} GiB/s", flush=True)
    migrations.close()


def compute(stop: threading.Event) -> None:
    matrix = np.ones((512, 512), np.float32)
    while not stop.is_set():
        matrix @ matrix


def move(world: World, store: HostStore, migrations: Migrations) -> float:
    """Rank 1 pulls from rank 0; GiB/s from the order to the last verified page."""
    pages = [store.allocate(PAGES) for _ in range(SEQUENCES)]
    theirs = world.broadcast(pages)
    sequences = [
        Sequence(i, i, 0, array("I", [1]), SamplingParams(max_tokens=1), status=Status.SUSPENDED, pages=theirs[i])
        for i in range(SEQUENCES)
    ]
    for own in pages if world.rank == 1 else []:
        store.release(own)
    world.comm.Barrier()  # type: ignore[union-attr]
    begin = time.perf_counter()
    if world.leads:
        migrations.start([Departure(i, 1, own) for i, own in enumerate(pages)], [])
        seconds = world.comm.recv(source=1)  # type: ignore[union-attr]
        for own in pages:
            store.release(own)
    else:
        migrations.start([], [Arrival(SequenceState.of(sequence), 0) for sequence in sequences])
        arrived = []
        while len(arrived) < SEQUENCES:
            arrived += migrations.collect()
            time.sleep(0.0005)
        seconds = time.perf_counter() - begin
        for moved in arrived:
            store.release(moved.pages or [])
        world.comm.send(seconds, dest=0)  # type: ignore[union-attr]
    world.wait_for_all()
    return SEQUENCES * PAGES * LAYOUT.page_bytes / seconds / 2**30


if __name__ == "__main__":
    main()
