"""MIGRATE between nodes: the leader of the destination pulls whole pages out of the source's pool by one-sided MPI.

Both ends work in threads, beside the computation. MPI moves data only while someone is inside of it, so the source's
leader waits, blocked, for the word that a sequence has arrived: while it waits the pull progresses, and between
migrations no thread takes a core. The pages stay the source's until rank 0 has heard of the arrival.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpcgen.cluster.messages import Arrival, Departure
from hpcgen.cluster.world import World
from hpcgen.memory.host_store import HostStore

if TYPE_CHECKING:
    from mpi4py import MPI

_LEAST_PATIENCE = 10.0
"""Seconds that every MIGRATE has."""
_END_SECONDS = 2.0
"""For threads to come out of MPI after a loss; one that does not is in an Rget from a node that is gone."""
_MOST_BYTES = 1 << 30
"""Of one Rget: older MPIs count in 32 bits."""


class Moved(NamedTuple):
    """A MIGRATE that came to an end at its destination."""

    sequence: int
    pages: list[int] | None
    """On this node; None where it did not come, or not as it was sent: the source has it still."""


def patience(tokens: int, seconds_per_token: float) -> float:
    """Seconds that the MIGRATE of so many tokens' KV may take: waiting longer costs more than computing them anew."""
    return _LEAST_PATIENCE + tokens * seconds_per_token


def page_checksum(store: HostStore, page: int) -> int:
    """CRC-32 of one page of KV."""
    return zlib.crc32(store.pages[page].numpy().data)


class Migrations:
    """The MIGRATEs from and to this node. Made and closed by all ranks together; the nodes' leaders do the work."""

    def __init__(self, world: World, store: HostStore) -> None:
        from mpi4py import MPI

        self._mpi, self._store, self._survives = MPI, store, world.survives
        self._comm: MPI.Intracomm = world.own_comm()
        self._sequence_tags = int(self._comm.Get_attr(MPI.TAG_UB) or 32767) // 2
        self._page_bytes = store.layout.page_bytes
        self._memory = store.pages.view(-1).numpy()
        # One pool a node: its leader exposes it, the other ranks nothing.
        self._window: MPI.Win = MPI.Win.Create(self._memory if world.is_leader else None, 1, comm=self._comm)
        self._window.Lock_all(MPI.MODE_NOCHECK)
        self._threads: list[threading.Thread] = []
        self._failures: list[BaseException] = []
        self._ended: list[Moved] = []
        self._fetching: list[_Fetching] = []
        self._lock = threading.Lock()

    def start(self, departures: Seq[Departure], arrivals: Seq[Arrival]) -> None:
        """Begins what an order asks for; returns at once."""
        if departures:
            self._run(self._send_off, departures)
        if arrivals:
            self._run(self._fetch_all, arrivals)

    def collect(self) -> list[Moved]:
        """What has ended here since the last call. Raises what a thread came to grief with."""
        with self._lock:
            if self._failures:
                raise self._failures.pop()
            self._give_up_late_ones()
            ended, self._ended = self._ended, []
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        return ended

    def abandon(self) -> list[int]:
        """After a loss, when ranks have regrouped: nothing is under way any more. Gives pages that may still change."""
        deadline = time.monotonic() + _END_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            return [page for fetching in self._fetching for page in fetching.pages]

    def close(self) -> None:
        """Waits for what is under way, and gives the window back. Collective, but where ranks may be gone."""
        if self._survives:
            return
        deadline = time.monotonic() + _LEAST_PATIENCE
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                return  # it waits for a node that does not answer, and holds the window
        self._window.Unlock_all()
        self._window.Free()
        self._comm.Free()

    def _run(self, work: Callable[[Any], None], moves: Seq[Any]) -> None:
        def run() -> None:
            try:
                work(moves)
            except Exception as error:
                with self._lock:
                    self._failures.append(error)

        thread = threading.Thread(target=run, name="migration", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _tag(self, sequence: int) -> int:
        """Of the checksums; the next one is that of the answer."""
        return 2 * (sequence % self._sequence_tags)

    def _send_off(self, departures: Seq[Departure]) -> None:
        requests = []
        for departure in departures:
            checksums = np.array([page_checksum(self._store, page) for page in departure.pages], dtype=np.uint32)
            requests.append(self._comm.Isend(checksums, departure.destination, self._tag(departure.sequence)))
        answer = np.empty(1, dtype=np.uint8)
        for departure in departures:
            # Blocked, not polling: that is what lets the destination's Rget through.
            self._comm.Recv(answer, departure.destination, self._tag(departure.sequence) + 1)
        self._mpi.Request.Waitall(requests)

    def _fetch_all(self, arrivals: Seq[Arrival]) -> None:
        fetching = _Fetching([arrival.state.id for arrival in arrivals])
        with self._lock:
            self._fetching.append(fetching)
        try:
            for arrival in arrivals:
                self._fetch(arrival, fetching)
        finally:
            with self._lock:
                self._fetching.remove(fetching)

    def _fetch(self, arrival: Arrival, fetching: _Fetching) -> None:
        """Pulls and verifies a sequence's pages, and tells the source."""
        key, theirs = arrival.state.id, arrival.state.pages
        fetching.deadline = time.monotonic() + arrival.patience
        expected = np.empty(len(theirs), dtype=np.uint32)
        self._comm.Recv(expected, arrival.source, self._tag(key))
        own = fetching.pages = self._store.allocate(len(theirs))
        self._pull(arrival.source, theirs, own)
        fetching.pages = []
        whole = [page_checksum(self._store, page) for page in own] == expected.tolist()
        with self._lock:
            wanted = not fetching.given_up
            if wanted:
                fetching.left.remove(key)
                self._ended.append(Moved(key, own if whole else None))
        if not (wanted and whole):
            self._store.release(own)
        self._comm.Send(np.array([whole], dtype=np.uint8), arrival.source, self._tag(key) + 1)

    def _pull(self, source: int, theirs: Seq[int], own: Seq[int]) -> None:
        """Blocked, not polling: each call into MPI moves a few kilobytes where the network does not do so by itself."""
        requests = [
            self._window.Rget(
                [self._bytes_of(to, count), self._mpi.BYTE],
                source,
                (start * self._page_bytes, count * self._page_bytes, self._mpi.BYTE),
            )
            for start, to, count in runs(theirs, own, max(1, _MOST_BYTES // self._page_bytes))
        ]
        self._mpi.Request.Waitall(requests)

    def _bytes_of(self, page: int, count: int) -> np.ndarray:
        return self._memory[page * self._page_bytes : (page + count) * self._page_bytes]

    def _give_up_late_ones(self) -> None:
        """A thread that waits for a node which does not answer waits for ever."""
        now = time.monotonic()
        for fetching in self._fetching:
            if now > fetching.deadline and not fetching.given_up:
                fetching.given_up = True
                self._ended += [Moved(sequence, None) for sequence in fetching.left]


class _Fetching:
    """Sequences that one thread fetches."""

    __slots__ = ("deadline", "given_up", "left", "pages")

    def __init__(self, sequences: list[int]) -> None:
        self.left = sequences
        self.deadline = float("inf")
        """When the one that is being fetched must have come."""
        self.given_up = False
        self.pages: list[int] = []
        """That are being written to."""


def runs(source: Seq[int], destination: Seq[int], longest: int) -> list[tuple[int, int, int]]:
    """(first source page, first destination page, count) of each stretch that is contiguous at both ends."""
    found: list[tuple[int, int, int]] = []
    for theirs, own in zip(source, destination, strict=True):
        if found:
            start, to, count = found[-1]
            if theirs == start + count and own == to + count and count < longest:
                found[-1] = (start, to, count + 1)
                continue
        found.append((theirs, own, 1))
    return found
