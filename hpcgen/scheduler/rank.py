"""What runs on a rank: lengths and pages of all active sequences, kept by one clock."""

from __future__ import annotations

from hpcgen.sequence import PAGE_TOKENS, Status

NOWHERE = -1
"""Node or rank of a sequence that has none."""


class Tracked:
    """What is known of one unfinished sequence."""

    __slots__ = (
        "_kv",
        "_pages",
        "destination",
        "id",
        "max_length",
        "node",
        "on",
        "prompt_tokens",
        "status",
        "target",
    )

    def __init__(self, sequence: int, prompt_tokens: int, max_length: int, target: int):
        self.id = sequence
        self.prompt_tokens = prompt_tokens
        self.max_length = max_length
        self.target = target
        """Tokens whose KV must exist before it can decode."""
        self.status = Status.WAITING
        self.node = NOWHERE
        """Node whose host store has its pages."""
        self.on: Rank | None = None
        """Rank it is active on."""
        self.destination = NOWHERE
        """Node it is to MIGRATE to."""
        # Of an active one, relative to its rank's clock: what all active ones do at every step is counted once a rank.
        self._kv = 0
        self._pages = 0

    @property
    def rank(self) -> int:
        """Index of the rank it is active on."""
        return NOWHERE if self.on is None else self.on.index

    @property
    def kv_length(self) -> int:
        """Tokens whose KV exists, by the last report."""
        return self._kv if self.on is None else self._kv + self.on.clock

    @property
    def pages(self) -> int:
        """Pages granted to it in the host store of its node; the same number on the device while it is active."""
        return self._pages if self.on is None else self._pages_at(self.on.granted)

    @property
    def progress(self) -> int:
        """Tokens decoded."""
        return self.kv_length - self.prompt_tokens

    def pages_after(self, steps: int) -> int:
        """Pages of its KV when it has decoded `steps` more tokens, or all that it may."""
        return -(-min(self.kv_length + steps, self.max_length) // PAGE_TOKENS)

    def _pages_at(self, clock: int) -> int:
        end = self._kv + clock
        return -(-(end if end < self.max_length else self.max_length) // PAGE_TOKENS)


class Rank:
    """The sequences active on one rank, and the device pages granted to them.

    Every active sequence grows by a token a step, so that lengths and pages follow from a clock. `_growing` counts, by
    the clock modulo PAGE_TOKENS, the sequences that begin a page there; `_ends` has those that are still below their
    greatest length, by the page of the clock at which they reach it.
    """

    __slots__ = ("_ends", "_growing", "active", "alive", "clock", "granted", "index", "node", "pages", "yielding")

    def __init__(self, index: int, node: int):
        self.index = index
        self.node = node
        self.alive = True
        self.active: dict[int, Tracked] = {}
        self.pages = 0
        self.yielding: list[int] = []
        """YIELDed in the last plan: in the host store, for others to use, when that plan is done."""
        self.clock = 0
        """Decode steps reported so far."""
        self.granted = 0
        """Value of the clock up to which the active sequences have pages."""
        self._growing = [0] * PAGE_TOKENS
        self._ends: dict[int, dict[int, Tracked]] = {}

    def grant_until(self, clock: int) -> int:
        """Grants the active sequences the pages that they come to need; gives how many."""
        before, self.granted = self.granted, clock
        if not self._ends:
            return 0
        pages = self._grant_last_pages(before)
        growing = self._growing
        sweeps, rest = divmod(clock - before, PAGE_TOKENS)
        if sweeps:
            pages += sweeps * sum(growing)
        if rest:
            first = (before + 1) % PAGE_TOKENS
            pages += sum(growing[first : first + rest]) + sum(growing[: max(first + rest - PAGE_TOKENS, 0)])
        self.pages += pages
        return pages

    def enter(self, sequence: Tracked) -> int:
        """It is active here; gives its pages."""
        sequence._kv -= self.clock
        sequence.on = self
        self.active[sequence.id] = sequence
        end = sequence.max_length - sequence._kv
        if end > self.granted:
            self._growing[(1 - sequence._kv) % PAGE_TOKENS] += 1
            self._ends.setdefault(end // PAGE_TOKENS, {})[sequence.id] = sequence
        pages = sequence._pages_at(self.granted)
        self.pages += pages
        return pages

    def leave(self, sequence: Tracked) -> None:
        """It is active no more."""
        del self.active[sequence.id]
        end = sequence.max_length - sequence._kv
        if end > self.granted:
            self._growing[(1 - sequence._kv) % PAGE_TOKENS] -= 1
            self._forget_end(end, sequence)
        sequence._pages = sequence._pages_at(self.granted)
        self.pages -= sequence._pages
        sequence.on = None
        sequence._kv += self.clock

    def _grant_last_pages(self, before: int) -> int:
        """Pages of those that come to their greatest length until `granted`: they grow no more."""
        pages = 0
        for page in range(before // PAGE_TOKENS, self.granted // PAGE_TOKENS + 1):
            if page not in self._ends:
                continue
            for sequence in list(self._ends[page].values()):
                end = sequence.max_length - sequence._kv
                if end <= self.granted:
                    pages += sequence._pages_at(end) - sequence._pages_at(before)
                    self._growing[(1 - sequence._kv) % PAGE_TOKENS] -= 1
                    self._forget_end(end, sequence)
        return pages

    def _forget_end(self, end: int, sequence: Tracked) -> None:
        ends = self._ends[end // PAGE_TOKENS]
        del ends[sequence.id]
        if not ends:
            del self._ends[end // PAGE_TOKENS]
