"""`/v1/batches`: create, list, get, cancel."""

import os
import secrets
import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query

from hpcgen.durable import DIRECTORY_MODE, sync_directory
from hpcgen.server.access import Access, get_access
from hpcgen.server.api_errors import ApiError, busy, not_found
from hpcgen.server.objects import BatchList, BatchObject, CreateBatch, ErrorResponse, page
from hpcgen.server.store import Full, StoredBatch, StoredFile

router = APIRouter(prefix="/v1/batches", tags=["batches"])
Caller = Annotated[Access, Depends(get_access)]
_MISSING: dict[int | str, dict[str, Any]] = {404: {"model": ErrorResponse}}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@router.post("", response_model=BatchObject, responses=_MISSING)
def create_batch(access: Caller, wanted: CreateBatch) -> BatchObject:
    """Takes a batch. When the answer comes it is durable, and is run whatever happens to the server."""
    file = access.store.file(access.owner, wanted.input_file_id)
    if file is None:
        raise not_found("file", wanted.input_file_id)
    if file.purpose != "batch":
        message = f"the file '{file.id}' has the purpose '{file.purpose}', not 'batch'"
        raise ApiError(400, message, "invalid_value", "input_file_id")
    batch = new_batch(
        access.owner,
        file,
        wanted.endpoint,
        wanted.completion_window,
        metadata=wanted.metadata,
        output_seconds=wanted.output_expires_after.seconds if wanted.output_expires_after else None,
    )
    admit(access, batch)
    return BatchObject.of(batch)


@router.get("", response_model=BatchList, responses=_MISSING)
def list_batches(
    access: Caller,
    after: Annotated[str | None, Query(max_length=100)] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> BatchList:
    """Batches of the token, newest first, a page after the batch `after`."""
    batches = access.store.batches(access.owner, limit + 1, after)
    if batches is None:
        raise not_found("batch", after or "")
    return BatchList(**page([BatchObject.of(batch) for batch in batches], limit))


@router.get("/{batch_id}", response_model=BatchObject, responses=_MISSING)
def get_batch(access: Caller, batch_id: str) -> BatchObject:
    return BatchObject.of(_batch(access, batch_id))


@router.post("/{batch_id}/cancel", response_model=BatchObject, responses={**_MISSING, 409: {"model": ErrorResponse}})
def cancel_batch(access: Caller, batch_id: str) -> BatchObject:
    """Ends a batch early. What is finished is delivered."""
    batch = _batch(access, batch_id)
    cancelled = access.store.update_batch(
        batch.id, ("validating", "in_progress"), status="cancelling", cancelling_at=int(time.time())
    )
    batch = _batch(access, batch_id)
    if not cancelled and batch.status not in ("cancelling", "cancelled"):
        raise ApiError(409, f"Cannot cancel a batch with status '{batch.status}'", "invalid_status")
    return BatchObject.of(batch)


def new_batch(owner: str, file: StoredFile, endpoint: str, window: str, **more: Any) -> StoredBatch:
    """A batch that nobody knows of yet."""
    now = int(time.time())
    return StoredBatch(
        id=f"batch_{secrets.token_hex(16)}",
        owner=owner,
        endpoint=endpoint,
        input_file_id=file.id,
        completion_window=window,
        created_at=now,
        expires_at=now + int(window[:-1]) * _SECONDS[window[-1]],
        lines=file.lines,
        **more,
    )


def admit(access: Access, batch: StoredBatch) -> None:
    """Makes a batch durable.

    Raises:
        ApiError: 429, the server is full; nothing has changed.
    """
    places, limits = access.server.places, access.server.limits
    directory = places.batch(batch.id)
    directory.mkdir(mode=DIRECTORY_MODE)
    try:
        os.link(places.file(batch.input_file_id), places.input(batch.id))
        sync_directory(directory)
        sync_directory(places.batches)
        access.store.add_batch(batch, limits.queued_batches, limits.queued_requests)
    except (Full, FileNotFoundError) as error:
        places.input(batch.id).unlink(missing_ok=True)
        directory.rmdir()
        if isinstance(error, FileNotFoundError):  # deleted this very moment
            raise not_found("file", batch.input_file_id) from None
        raise busy("the server has as many unfinished batches as it takes", limits.retry_after) from None


def _batch(access: Access, id: str) -> StoredBatch:
    batch = access.store.batch(access.owner, id)
    if batch is None:
        raise not_found("batch", id)
    return batch
