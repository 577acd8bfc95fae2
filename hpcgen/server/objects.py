"""The objects of the API: what OpenAI's clients send and get."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from hpcgen.server.store import StoredBatch, StoredFile

LONGEST_SECONDS = 30 * 86400
BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
MetadataValue = Annotated[str, Field(max_length=512)]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    error: ErrorDetail


class FileObject(BaseModel):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"

    @classmethod
    def of(cls, file: StoredFile) -> "FileObject":
        return cls(
            id=file.id,
            bytes=file.bytes,
            created_at=file.created_at,
            expires_at=file.expires_at,
            filename=file.filename,
            purpose=file.purpose,  # type: ignore[arg-type]
        )


class FileDeleted(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class FileList(BaseModel):
    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ExpiresAfter(BaseModel):
    model_config = ConfigDict(extra="forbid")

    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=LONGEST_SECONDS, strict=True)


class CreateBatch(BaseModel):
    model_config = ConfigDict(extra="forbid")

    input_file_id: str = Field(max_length=100)
    endpoint: Literal["/v1/chat/completions", "/v1/completions"]
    completion_window: str = Field(
        pattern=r"^[1-9][0-9]{0,5}[smhd]$", description="as in OpenAI's API, 24h; or 90s, 30m, 7d"
    )
    metadata: dict[Annotated[str, Field(max_length=64)], MetadataValue] | None = Field(default=None, max_length=16)
    output_expires_after: ExpiresAfter | None = None


class BatchErrorDatum(BaseModel):
    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchErrors(BaseModel):
    object: Literal["list"] = "list"
    data: list[BatchErrorDatum]


class RequestCounts(BaseModel):
    total: int
    completed: int
    failed: int


class BatchObject(BaseModel):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None

    @classmethod
    def of(cls, batch: StoredBatch) -> "BatchObject":
        same = {name: getattr(batch, name) for name in cls.model_fields if name not in _COMPOSED}
        return cls(
            **same,
            errors=BatchErrors(data=[BatchErrorDatum(**error) for error in batch.errors]) if batch.errors else None,
            request_counts=RequestCounts(total=batch.total, completed=batch.completed, failed=batch.failed),
        )


_COMPOSED = ("object", "errors", "request_counts")


class BatchList(BaseModel):
    object: Literal["list"] = "list"
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ModelObject(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "hpcgen"


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelObject]


class Health(BaseModel):
    status: Literal["ok"] = "ok"


def page(items: list[Any], limit: int) -> dict[str, Any]:
    """Fields of a list of which one more than `limit` was asked for."""
    data = items[:limit]
    ends = {"first_id": data[0].id if data else None, "last_id": data[-1].id if data else None}
    return {"data": data, "has_more": len(items) > limit, **ends}
