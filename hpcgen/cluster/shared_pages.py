"""The free pages of a host store that several ranks of a node share: a stack in their common memory, under a lock."""

import fcntl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import numpy as np

from hpcgen.memory.host_store import HostStoreFull

_HEADER = 2  # int32 words before the stack: how many pages are free, and one that is unused
_POLL_SECONDS = 0.0002


class SharedFreePages:
    """A stack of page numbers in shared memory.

    The lock is the kernel's, on the file: a rank that dies while it holds it lets it go. A plan may give one rank the
    pages that another rank of the node frees in the same plan, so `take` waits for them.
    """

    def __init__(self, words: np.ndarray, file: int, patience: float = 60.0):
        """`words`: int32 [`words_for(count)`] that all ranks of the node map; `file`: descriptor of the open file,
        opened by this process itself. `patience`: seconds to wait for pages before it is an error."""
        self._words, self._file, self._patience = words, file, patience
        self._stack = words[_HEADER:]
        self.while_waiting: Callable[[], None] = lambda: None
        """Called now and then by a `take` that waits; may raise."""
        self._holding = False
        self._held: list[int] = []
        self.retired: set[int] = set()
        """Pages of which this rank says that nobody may use them any more."""
        # The kernel's lock belongs to the open file and does not keep threads of one process apart.
        self._threads = threading.Lock()

    @staticmethod
    def words_for(count: int) -> int:
        """int32 words that the stack of `count` pages takes."""
        return _HEADER + count

    def fill(self) -> None:
        """Makes all pages free. By one rank, before any other uses them."""
        with self._locked():
            self._stack[:] = np.arange(len(self._stack) - 1, -1, -1, dtype=np.int32)
            self._words[0] = len(self._stack)

    def keep_only(self, owned: Iterable[int]) -> None:
        """Frees every page that is not in `owned`: what a rank had that died is lost otherwise. No rank of the node may
        take or give meanwhile."""
        with self._locked():
            free = np.setdiff1d(np.arange(len(self._stack), dtype=np.int32), np.fromiter(owned, np.int32))
            self._stack[: len(free)] = free[::-1]
            self._words[0] = len(free)

    def __len__(self) -> int:
        return int(self._words[0])

    def take(self, count: int) -> list[int]:
        if count == 0:
            return []
        deadline = time.monotonic() + self._patience
        while True:
            with self._locked():
                free = int(self._words[0])
                if count <= free:
                    taken = self._stack[free - count : free][::-1].tolist()
                    self._words[0] = free - count
                    return taken
            if time.monotonic() > deadline:
                raise HostStoreFull(f"{count} pages asked for, {free} of {len(self._stack)} are free on this node")
            self.while_waiting()
            time.sleep(_POLL_SECONDS)

    @contextmanager
    def held(self) -> Iterator[None]:
        """What this rank gives in the block stays as it is until `let_go`: nobody else may use it before."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False

    def let_go(self) -> None:
        """Makes free what was given while it was `held`."""
        with self._threads:
            pages, self._held = self._held, []
        self._give(pages)

    def drop_held(self) -> None:
        """Somebody else makes free what was given while it was `held`."""
        with self._threads:
            self._held = []

    def give(self, pages: Iterable[int]) -> None:
        with self._threads:
            if self._holding:
                self._held += pages
                return
        self._give(pages)

    def _give(self, pages: Iterable[int]) -> None:
        returned = np.fromiter(pages, np.int32)
        if not len(returned):
            return
        with self._locked():
            free = int(self._words[0])
            self._stack[free : free + len(returned)] = returned
            self._words[0] = free + len(returned)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._threads:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)
