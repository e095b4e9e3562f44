"""Bodies of ``/v1/files`` and ``/v1/batches``, in OpenAI's shapes."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

BatchStatus = Literal[
    "validating",
    "failed",
    "in_progress",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
OPEN: tuple[BatchStatus, ...] = ("validating", "in_progress", "cancelling")
"""Of batches that somebody has to work on."""
ENDED: tuple[BatchStatus, ...] = ("failed", "completed", "expired", "cancelled")
Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
MAX_METADATA = 16


class FileUpload(msgspec.Struct, kw_only=True):
    """The parts of a form in ``POST /v1/files``."""

    file: str
    purpose: Literal["batch"]


class File(msgspec.Struct, kw_only=True):
    """One file."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"


class FileList(msgspec.Struct, kw_only=True):
    """Response of ``GET /v1/files``."""

    object: Literal["list"] = "list"
    data: list[File]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(msgspec.Struct, kw_only=True):
    """Response of ``DELETE /v1/files/{file_id}``."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class BatchRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /v1/batches``."""

    input_file_id: Annotated[str, Meta(min_length=1, max_length=128)]
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: (
        Annotated[dict[str, Annotated[str, Meta(max_length=512)]], Meta(max_length=MAX_METADATA)]
        | None
    ) = None


class BatchLine(msgspec.Struct, kw_only=True):
    """One line of a batch's input file."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: Endpoint
    body: msgspec.Raw


class LineAnswer(msgspec.Struct, kw_only=True):
    """What a line was answered, as over HTTP."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class LineError(msgspec.Struct, kw_only=True):
    """Why a line was never sent."""

    code: str
    message: str


class LineResult(msgspec.Struct, kw_only=True):
    """One line of a batch's output or error file."""

    id: str
    custom_id: str
    response: LineAnswer | None
    error: LineError | None = None


class FileError(msgspec.Struct, kw_only=True):
    """What is wrong with an input file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class FileErrors(msgspec.Struct, kw_only=True):
    """All of it that is told."""

    object: Literal["list"] = "list"
    data: list[FileError]


class RequestCounts(msgspec.Struct, kw_only=True):
    """How far a batch has come."""

    total: int
    completed: int
    failed: int


class Batch(msgspec.Struct, kw_only=True):
    """One batch."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: FileErrors | None = None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts
    metadata: dict[str, Any] | None = None


class BatchList(msgspec.Struct, kw_only=True):
    """Response of ``GET /v1/batches``."""

    object: Literal["list"] = "list"
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool
