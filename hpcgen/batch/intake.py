"""Tokenization ahead of the engine, in worker processes, by a bounded number of requests."""

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING

from hpcgen.batch.reader import BatchInput, Line, read_line
from hpcgen.batch.request import InvalidRequest, Request, RequestError
from hpcgen.errors import HpcgenError
from hpcgen.sequence import Sequence

if TYPE_CHECKING:
    from hpcgen.batch.tokenization import RequestTokenizer

_LINES_PER_TASK = 16
"""Large enough that handing tasks over costs little beside tokenization, small enough that the first come soon."""


class IntakeError(HpcgenError):
    """Tokenization as a whole cannot go on."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class IntakeItem:
    """A request ready for the engine, or the reason why it never will be."""

    request: int
    """Position in the input, from 0."""
    sequences: list[Sequence] = field(default_factory=list)
    """One for each sample; empty if there is an error."""
    error: RequestError | None = None


class TokenizerPool:
    """Worker processes that tokenize, for one intake or for several of the same model.

    Args:
        model_directory: Hugging Face directory with the tokenizer.
        run_seed: seed of requests that have none of their own.
        max_model_len: most tokens of a sequence.
        workers: worker processes; one tokenizes some 10^5 to 10^6 tokens a second.

    The workers start with `start` or with the first task. Call `close`.
    """

    def __init__(self, model_directory: str | Path, run_seed: int, max_model_len: int, workers: int = 1) -> None:
        # Spawned, not forked: the parent has threads, an accelerator's context and MPI, none of which survives a fork.
        with _job_signals_held_back():
            self._pool = ProcessPoolExecutor(
                max_workers=workers,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_start_worker,
                initargs=(str(model_directory), run_seed, max_model_len),
            )

    def start(self) -> None:
        """Begin to load the tokenizer, while the caller still does something else."""
        with _job_signals_held_back():
            self._pool.submit(int)

    def submit(self, batch_input: BatchInput, lines: list[Line]) -> Future[list[IntakeItem]]:
        """The items of these lines, to come; BrokenProcessPool where a worker died."""
        try:
            with _job_signals_held_back():
                return self._pool.submit(_tokenize, str(batch_input.path), batch_input.max_line_bytes, lines)
        except BrokenProcessPool as error:
            failed: Future[list[IntakeItem]] = Future()
            failed.set_exception(error)
            return failed

    def close(self) -> None:
        """Stop the workers; what they have not begun is dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)


class Intake:
    """Requests in input order, read, templated and tokenized by worker processes.

    Args:
        batch_input: the input.
        model_directory: Hugging Face directory with the tokenizer.
        run_seed: seed of requests that have none of their own.
        max_model_len: most tokens of a sequence.
        skip: `skip(index)` is true for requests that are finished already.
        requests: the ones to read first, more can be added; None: all of the input.
        workers: worker processes; one tokenizes some 10^5 to 10^6 tokens a second.
        ahead: most requests that are tokenized, or in work, and not yet taken.
        pool: workers that other intakes use too, of the same model, seed and limit; None: workers of its own.

    The workers start with `start` or with the first request. Use it as a context manager, or call `close`.
    """

    def __init__(
        self,
        batch_input: BatchInput,
        model_directory: str | Path,
        run_seed: int,
        max_model_len: int,
        skip: Callable[[int], bool] = lambda index: False,
        requests: range | None = None,
        workers: int = 1,
        ahead: int = 512,
        pool: TokenizerPool | None = None,
    ) -> None:
        self._input = batch_input
        self._skip = skip
        self._ahead = ahead
        self._unread = deque([range(len(batch_input)) if requests is None else requests])
        self._tasks: deque[tuple[int, Future[list[IntakeItem]]]] = deque()
        self._items: deque[IntakeItem] = deque()
        self._in_work = 0
        self._owns_pool = pool is None
        self._pool = pool or TokenizerPool(model_directory, run_seed, max_model_len, workers)

    def start(self) -> None:
        """Begin to tokenize, while the caller still does something else."""
        self._submit()

    def add(self, requests: range) -> None:
        """More requests to read, after those that are left."""
        self._unread.append(requests)

    @property
    def exhausted(self) -> bool:
        """Whether every request that was asked for has been taken."""
        self._submit()
        return not self._tasks and not self._items

    def take(self, block: bool) -> IntakeItem | None:
        """The next request. None when there is none left, or, without `block`, none ready.

        Raises:
            IntakeError: a worker process died.
            TokenizerError: the model directory has no tokenizer that we can use.
        """
        self._submit()
        if not self._items and self._tasks and (block or self._tasks[0][1].done()):
            lines, task = self._tasks.popleft()
            try:
                self._items.extend(task.result())
            except BrokenProcessPool:
                raise IntakeError(
                    "a tokenization worker died (killed for memory, or by a signal, or its start failed: "
                    "its own message, if any, is above); run the same command again to continue"
                ) from None
            self._in_work -= lines
        if not self._items:
            return None
        item = self._items.popleft()
        self._submit()
        return item

    def close(self) -> None:
        """Stop the workers; what they have not begun is dropped."""
        for _, task in self._tasks:
            task.cancel()
        if self._owns_pool:
            self._pool.close()

    def __enter__(self) -> "Intake":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _submit(self) -> None:
        """Keep at most `ahead` requests in work or waiting to be taken."""
        while self._unread:
            room = self._ahead - self._in_work - len(self._items)
            if room < min(_LINES_PER_TASK, self._ahead):
                return
            lines: list[Line] = []
            while len(lines) < min(_LINES_PER_TASK, room) and self._unread:
                part = self._unread.popleft()
                if not part:
                    continue
                if not self._skip(part[0]):
                    lines.append(self._input.line(part[0]))
                self._unread.appendleft(part[1:])
            if lines:
                self._tasks.append((len(lines), self._pool.submit(self._input, lines)))
                self._in_work += len(lines)


_JOB_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""What a scheduler or a terminal sends to the whole job is the parent's to handle; it stops the workers in the end."""


@contextmanager
def _job_signals_held_back() -> Iterator[None]:
    """A process that is started in it, a worker or multiprocessing's resource tracker, does not die of these signals
    in the second before it can say that it ignores them: the mask is inherited. Here they come a moment later."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _JOB_SIGNALS)
    try:
        resource_tracker.ensure_running()
        # Starting the tracker lets some of them through again.
        signal.pthread_sigmask(signal.SIG_BLOCK, _JOB_SIGNALS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_tokenizer: "RequestTokenizer | HpcgenError | None" = None
"""That of a worker process, set once by its initializer. An error if the start failed: raised with the first task, it
reaches the parent, which an initializer's does not."""


def _start_worker(model_directory: str, run_seed: int, max_model_len: int) -> None:
    global _tokenizer
    for number in _JOB_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # transformers imports torch if it is there, a second and 200 MB for nothing here; None in sys.modules hides it.
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    from hpcgen.batch.tokenization import RequestTokenizer

    try:
        _tokenizer = RequestTokenizer(model_directory, run_seed, max_model_len)
    except HpcgenError as error:
        _tokenizer = error


def _exit_with_parent() -> None:
    """The pool's queue gives no sign of a parent that was killed: without this the worker would wait for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _tokenize(path: str, max_line_bytes: int, lines: list[Line]) -> list[IntakeItem]:
    assert _tokenizer is not None
    if isinstance(_tokenizer, HpcgenError):
        raise _tokenizer
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return [_item(_tokenizer, read_line(fd, line, max_line_bytes), line.index) for line in lines]
    finally:
        os.close(fd)


def _item(tokenizer: "RequestTokenizer", request: Request | RequestError, index: int) -> IntakeItem:
    if isinstance(request, RequestError):
        return IntakeItem(index, error=request)
    try:
        return IntakeItem(index, tokenizer.sequences(request))
    except InvalidRequest as error:
        return IntakeItem(index, error=RequestError.of(error, request.line, request.custom_id))
