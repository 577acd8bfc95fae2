"""The check of a batch's input before it is run, and the thread that does it."""

import logging
import threading
import time
from typing import Any

from hpcgen.batch.reader import BatchInput
from hpcgen.batch.request import RequestError
from hpcgen.errors import HpcgenError
from hpcgen.server.access import Server
from hpcgen.server.store import StoredBatch

MOST_ERRORS = 100
"""Errors that a batch object lists; an input may have one in every line."""
_OF_THE_BODY = "body"
_log = logging.getLogger(__name__)


def validate(batch_input: BatchInput, endpoint: str, model: str, most_requests: int) -> list[dict[str, Any]]:
    """What makes the whole batch fail, as entries of its `errors`.

    As in OpenAI's API these are faults of the file: lines that are no requests, ids used twice, another endpoint or
    model than the batch's. A request whose body is wrong fails alone when the batch runs.
    """
    count = len(batch_input)
    if count == 0:
        return [_error("empty_file", "The input file is empty.")]
    if count > most_requests:
        message = f"The input file has {count} requests, more than the limit of {most_requests}."
        return [_error("too_many_requests", message)]
    errors: list[dict[str, Any]] = []
    for index in range(count):
        error = _check(batch_input, index, endpoint, model)
        if error is not None:
            errors.append(error)
            if len(errors) == MOST_ERRORS:
                break
    return errors


def _check(batch_input: BatchInput, index: int, endpoint: str, model: str) -> dict[str, Any] | None:
    request = batch_input.read(index)
    line = index + 1
    if isinstance(request, RequestError):
        if (request.param or "").partition(".")[0] == _OF_THE_BODY and request.code != "missing_body":
            return None
        return _error(request.code, request.message, request.param, line)
    if request.url != endpoint:
        message = f"line {line}: the url {request.url} is not the batch's endpoint, {endpoint}"
        return _error("mismatched_endpoint", message, "url", line)
    if request.body.model not in (None, model):
        message = f"line {line}: there is no model '{request.body.model}' here; this server has '{model}'"
        return _error("model_not_found", message, "body.model", line)
    return None


def _error(code: str, message: str, param: str | None = None, line: int | None = None) -> dict[str, Any]:
    return {"code": code, "message": message, "param": param, "line": line}


class Validator:
    """A thread that takes batches from `validating` to `in_progress` or `failed`."""

    def __init__(self, server: Server, interval: float = 0.5) -> None:
        self._server, self._interval = server, interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="validator", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def turn(self) -> None:
        """Checks all batches that wait for it, small ones first."""
        while waiting := self._server.store.batches_in("validating"):
            self._validate(min(waiting, key=lambda batch: batch.lines))

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self._turn_or_log()

    def _turn_or_log(self) -> None:
        try:
            self.turn()
        except Exception:  # a full disk, say: it may get better, and the batches are still there
            _log.exception("validation failed")

    def _validate(self, batch: StoredBatch) -> None:
        server = self._server
        try:
            batch_input = BatchInput(server.places.input(batch.id), server.limits.line_bytes)
            try:
                errors = validate(batch_input, batch.endpoint, server.model, server.limits.requests_per_batch)
                count = len(batch_input)
            finally:
                batch_input.close()
        except HpcgenError as error:
            _log.error("%s: %s", batch.id, error)
            errors, count = [_error("unreadable_file", "The input file cannot be read.")], 0
        except Exception:  # a mistake of ours must not keep all other batches waiting
            _log.exception("%s cannot be checked", batch.id)
            errors, count = [_error("validation_failed", "The input file could not be checked.")], 0
        now = int(time.time())
        if errors:
            changes: dict[str, Any] = {"status": "failed", "failed_at": now, "errors": errors}
        else:
            changes = {"status": "in_progress", "in_progress_at": now, "total": count, "lines": count}
        server.store.update_batch(batch.id, ("validating",), **changes)
