"""Asynchronous copies and the events that order them: one interface, a CUDA and a CPU implementation.

The CPU one runs the copies on a worker thread, so that code which overlaps copies with computation
takes the same path, and can go wrong in the same ways, on a machine without a GPU.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

CopyPair = tuple[torch.Tensor, torch.Tensor]
"""(destination, source), of equal shape and dtype."""


class Event(Protocol):
    """A point in a stream of copies."""

    def wait(self) -> None:
        """What is computed from now on comes after the copies before this point."""

    def done(self) -> bool: ...


class CopyStream(Protocol):
    """Copies in the order in which they are given, each after all that was computed before it was given."""

    def copy(self, pairs: Iterable[CopyPair]) -> Event: ...

    def synchronize(self) -> None:
        """Returns when every copy is done."""

    def close(self) -> None: ...


class _ThreadEvent:
    def __init__(self, future: "Future[None]"):
        self._future = future

    def wait(self) -> None:
        self._future.result()

    def done(self) -> bool:
        return self._future.done()


class ThreadCopyStream:
    """Copies on one worker thread. Computation on the CPU is synchronous, so a copy given later is after it."""

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hpcgen-copy")
        self._last: Future[None] | None = None

    def copy(self, pairs: Iterable[CopyPair]) -> Event:
        self._last = self._worker.submit(_copy_all, list(pairs))
        return _ThreadEvent(self._last)

    def synchronize(self) -> None:
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        self._worker.shutdown(wait=True)


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event):
        self._event = event

    def wait(self) -> None:
        self._event.wait(torch.cuda.current_stream())

    def done(self) -> bool:
        return self._event.query()


class CudaCopyStream:
    """Copies on a CUDA stream of its own; the host side should be pinned, else CUDA makes them synchronous."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device)

    def copy(self, pairs: Iterable[CopyPair]) -> Event:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for destination, source in pairs:
                destination.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return _CudaEvent(event)

    def synchronize(self) -> None:
        self._stream.synchronize()

    def close(self) -> None:
        self.synchronize()


def open_copy_stream(device: torch.device) -> CopyStream:
    """The copy stream for `device`."""
    return CudaCopyStream(device) if device.type == "cuda" else ThreadCopyStream()


def host_synchronize(device: torch.device) -> Callable[[], None]:
    """Function that waits until what was computed on `device` can be read by the host."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None


def _copy_all(pairs: list[CopyPair]) -> None:
    # inference mode is per thread, and the buffers are inference tensors
    with torch.inference_mode():
        for destination, source in pairs:
            destination.copy_(source)
