"""Stands in for the engine: a token for every sequence at each step, and none of the cost."""

from collections.abc import Iterable
from concurrent.futures import Future, wait
from pathlib import Path

from hpcgen.batch.detokenization import Detokenizer
from hpcgen.batch.intake import IntakeItem
from hpcgen.batch.reader import BatchInput, Line, read_line
from hpcgen.batch.request import InvalidRequest, RequestError
from hpcgen.batch.tokenization import RequestTokenizer
from hpcgen.engine.executor import Activity
from hpcgen.scheduler.plan import Load
from hpcgen.sequence import Sequence, Status
from hpcgen.server.access import Server
from hpcgen.server.delivery import RunSettings
from hpcgen.server.pool import Pool

LONGEST = 256


class ScriptedEngine:
    """Gives every sequence token 50 until it has all; those that `fail` wants end in an error."""

    def __init__(self) -> None:
        self.activity = Activity()
        self.running: dict[int, Sequence] = {}
        self.cancelled: set[int] = set()
        self.order: list[int] = []
        """Ids in the order of `add`."""

    @property
    def pending(self) -> int:
        return len(self.running)

    @property
    def backlog(self) -> int:
        return sum(len(s.prompt) for s in self.running.values() if not s.output)

    def add(self, sequence: Sequence) -> None:
        assert sequence.id not in self.order, "ids are unique over all batches"
        self.order.append(sequence.id)
        self.running[sequence.id] = sequence

    def cancel(self, keys: Iterable[int]) -> None:
        for key in keys:
            self.running.pop(key)
            self.cancelled.add(key)

    @property
    def load(self) -> Load:
        return Load(active=[len(self.running)], suspended=0, waiting=0, host_pages=[0])

    def step(self) -> list[Sequence]:
        ended = []
        for sequence in list(self.running.values()):
            sequence.output.append(50)
            if len(sequence.output) == sequence.sampling.max_tokens:
                sequence.finish_reason, sequence.status = "length", Status.FINISHED
                ended.append(self.running.pop(sequence.id))
        return ended


class InlineTokenizers:
    """A TokenizerPool without processes."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = RequestTokenizer(model, 0, LONGEST)

    def submit(self, batch_input: BatchInput, lines: list[Line]) -> "Future[list[IntakeItem]]":
        done: Future[list[IntakeItem]] = Future()
        done.set_result([self._item(batch_input, line) for line in lines])
        return done

    def close(self) -> None:
        pass

    def _item(self, batch_input: BatchInput, line: Line) -> IntakeItem:
        request = read_line(batch_input._fd, line, batch_input.max_line_bytes)
        if isinstance(request, RequestError):
            return IntakeItem(line.index, error=request)
        try:
            return IntakeItem(line.index, self._tokenizer.sequences(request))
        except InvalidRequest as error:
            return IntakeItem(line.index, error=RequestError.of(error, request.line, request.custom_id))


def settings(model: Path, sub_batch: int | None = None, seed: int = 0) -> RunSettings:
    return RunSettings(model, {"seed": seed, "sub_batch": sub_batch}, sub_batch, 2**20)


class TestPool:
    """A pool over a scripted engine, with a clock that the test moves."""

    __test__ = False

    def __init__(
        self,
        server: Server,
        model: Path,
        detokenizer: Detokenizer,
        wave: int = 64,
        interval: float = 0.0,
        **chosen: object,
    ) -> None:
        self.engine, self.now, self._server = ScriptedEngine(), 0.0, server
        self.pool = Pool(
            self.engine,  # type: ignore[arg-type]
            server.store,
            server.places,
            settings(model, **chosen),  # type: ignore[arg-type]
            detokenizer,
            InlineTokenizers(model),  # type: ignore[arg-type]
            wave,
            clock=lambda: self.now,
            checkpoint_interval=interval,
        )

    def turns(self, count: int) -> None:
        """So many decisions of the engine, each with a look at the store, and all file work done in between."""
        for _ in range(count):
            self.now += 1.0
            self.pool.turn()
            wait([*self.pool._opening.values(), *self.pool._delivering.values(), *self.pool._saving])

    def until(self, id: str, *statuses: str, most: int = 500) -> int:
        """Turns until the batch has one of these states; how many it took."""
        for number in range(most):
            if self._server.store.any_batch(id).status in statuses:
                return number
            self.turns(1)
        raise AssertionError(f"{id} is still {self._server.store.any_batch(id).status}")
