"""The states of a sequence, and the user's own operations on entering one (paper §4.4)."""

from collections import defaultdict
from collections.abc import Callable

from hpcgen.sequence import Sequence, Status

Callback = Callable[[Sequence, Status], None]
"""Called with the sequence, already in its new state, and the state it left."""


class Lifecycle:
    """Moves sequences between states and tells whoever asked."""

    def __init__(self) -> None:
        self._callbacks: dict[Status, list[Callback]] = defaultdict(list)

    def on(self, status: Status, callback: Callback) -> None:
        """Calls `callback` whenever a sequence enters `status`, after those registered before."""
        self._callbacks[status].append(callback)

    def move(self, sequence: Sequence, status: Status) -> None:
        """Puts the sequence into `status`. Staying in a state is not entering it."""
        left = sequence.status
        if left is status:
            return
        sequence.status = status
        for callback in self._callbacks[status]:
            callback(sequence, left)
