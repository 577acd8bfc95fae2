"""`/v1/files`: upload, list, get, delete, content."""

import secrets
import time
from typing import Annotated, Any, Literal
from urllib.parse import quote

from anyio import to_thread
from fastapi import APIRouter, Depends, Query, Request
from pydantic import ValidationError
from starlette.responses import FileResponse

from hpcgen.server.access import Access, get_access
from hpcgen.server.api_errors import ApiError, not_found
from hpcgen.server.objects import ErrorResponse, ExpiresAfter, FileDeleted, FileList, FileObject, page
from hpcgen.server.store import Full, StoredFile
from hpcgen.server.upload import Upload, receive

router = APIRouter(prefix="/v1/files", tags=["files"])
Caller = Annotated[Access, Depends(get_access)]
FileId = Annotated[str, "a file's id"]
_MISSING: dict[int | str, dict[str, Any]] = {404: {"model": ErrorResponse}}
_FORM = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["purpose", "file"],
                "additionalProperties": False,
                "properties": {
                    "purpose": {"type": "string", "enum": ["batch"]},
                    "file": {"type": "string", "format": "binary"},
                    "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                    "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2592000},
                },
                "dependentRequired": {
                    "expires_after[anchor]": ["expires_after[seconds]"],
                    "expires_after[seconds]": ["expires_after[anchor]"],
                },
            }
        }
    },
}


@router.post(
    "",
    response_model=FileObject,
    responses={507: {"model": ErrorResponse}},
    openapi_extra={"requestBody": _FORM},
)
async def upload_file(request: Request, access: Caller) -> FileObject:
    """Stores a file of requests. It is streamed to disk; when the answer comes it is durable."""
    limits, places = access.server.limits, access.server.places
    content_type = request.headers.get("content-type", "")
    upload = await receive(content_type, request.stream(), places.files, limits.file_bytes)
    try:
        return await to_thread.run_sync(_store, upload, access)
    finally:
        upload.discard()


@router.get("", response_model=FileList, responses=_MISSING)
def list_files(
    access: Caller,
    purpose: Annotated[Literal["batch", "batch_output"] | None, Query()] = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Annotated[Literal["asc", "desc"], Query()] = "desc",
    after: Annotated[str | None, Query(max_length=100)] = None,
) -> FileList:
    """Files of the token, a page after the file `after`."""
    files = access.store.files(access.owner, limit + 1, after, purpose, rising=order == "asc")
    if files is None:
        raise not_found("file", after or "")
    return FileList(**page([FileObject.of(file) for file in files], limit))


@router.get("/{file_id}", response_model=FileObject, responses=_MISSING)
def get_file(access: Caller, file_id: FileId) -> FileObject:
    return FileObject.of(_file(access, file_id))


@router.delete("/{file_id}", response_model=FileDeleted, responses=_MISSING)
def delete_file(access: Caller, file_id: FileId) -> FileDeleted:
    """Deletes a file. Batches that it is the input of go on."""
    if not access.store.delete_file(access.owner, file_id):
        raise not_found("file", file_id)
    access.server.places.file(file_id).unlink(missing_ok=True)
    return FileDeleted(id=file_id)


@router.get(
    "/{file_id}/content",
    response_class=FileResponse,
    responses={
        **_MISSING,
        200: {"content": {"application/octet-stream": {}}},
        206: {"description": "The range asked for", "content": {"application/octet-stream": {}}},
        416: {"description": "No such range", "content": {"text/plain": {}}},
    },
)
def get_content(access: Caller, file_id: FileId) -> FileResponse:
    """The file itself, or the ranges of it that the header `Range` asks for."""
    file = _file(access, file_id)
    headers = {
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(file.filename, safe='')}",
        "X-Content-Type-Options": "nosniff",
    }
    path = access.server.places.file(file.id)
    return FileResponse(path, media_type="application/octet-stream", headers=headers)


def _file(access: Access, id: str) -> StoredFile:
    file = access.store.file(access.owner, id)
    if file is None:
        raise not_found("file", id)
    return file


def _store(upload: Upload, access: Access) -> FileObject:
    purpose = upload.fields.get("purpose")
    if purpose != "batch":
        raise ApiError(400, "purpose must be 'batch'", "invalid_value", "purpose")
    now = int(time.time())
    file = StoredFile(
        id=f"file-{secrets.token_hex(16)}",
        owner=access.owner,
        filename=upload.filename,
        purpose=purpose,
        bytes=upload.bytes,
        lines=upload.lines,
        created_at=now,
        expires_at=_expiry(upload.fields, now),
    )
    path = access.server.places.file(file.id)
    upload.keep(path)
    try:
        access.store.add_file(file, access.server.limits.files)
    except Full:
        path.unlink()
        most = access.server.limits.files
        raise ApiError(403, f"there are {most} files already: delete some", "file_limit_exceeded") from None
    return FileObject.of(file)


def _expiry(fields: dict[str, str], now: int) -> int | None:
    given = {name[len("expires_after[") : -1]: value for name, value in fields.items() if name.startswith("expires")}
    if not given:
        return None
    try:
        seconds = int(given.pop("seconds", "0"))
        return now + ExpiresAfter(seconds=seconds, **given).seconds  # type: ignore[arg-type]
    except (ValueError, ValidationError):
        message = "expires_after needs an anchor of created_at, and seconds from 3600 to 2592000"
        raise ApiError(400, message, "invalid_value", "expires_after") from None
