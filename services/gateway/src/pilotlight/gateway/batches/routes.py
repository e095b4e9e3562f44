"""Routes of files and batches."""

from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pilotlight.common.errors import BadRequest
from pilotlight.gateway.batches.files import MAX_LISTED, FileStore
from pilotlight.gateway.batches.multipart import form_of
from pilotlight.gateway.batches.repository import BatchRepository, page_ids
from pilotlight.gateway.batches.runner import BatchRunner
from pilotlight.gateway.edge.reading import read_body
from pilotlight.gateway.openai.api import OpenAiApi
from pilotlight.gateway.schema.batches import (
    BatchList,
    BatchRequest,
    DeletedFile,
    FileList,
)

FILES_PATH = "/v1/files"
BATCHES_PATH = "/v1/batches"
DEFAULT_LISTED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRoutes:
    """The handlers."""

    api: OpenAiApi
    files: FileStore
    batches: BatchRepository
    runner: BatchRunner
    max_file_bytes: int

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route(FILES_PATH, self.upload, methods=["POST"]),
            Route(FILES_PATH, self.list_files, methods=["GET"]),
            Route(f"{FILES_PATH}/{{file_id}}", self.file, methods=["GET"]),
            Route(f"{FILES_PATH}/{{file_id}}", self.remove, methods=["DELETE"]),
            Route(f"{FILES_PATH}/{{file_id}}/content", self.content, methods=["GET"]),
            Route(BATCHES_PATH, self.create, methods=["POST"]),
            Route(BATCHES_PATH, self.list_batches, methods=["GET"]),
            Route(f"{BATCHES_PATH}/{{batch_id}}", self.batch, methods=["GET"]),
            Route(f"{BATCHES_PATH}/{{batch_id}}/cancel", self.cancel, methods=["POST"]),
        ]

    async def upload(self, request: Request) -> Response:
        """Keep a file."""
        key_id = await self._key_id(request)
        body = await read_body(request, self.max_file_bytes, key_id, decoded=False)
        form = form_of(request.headers.get("content-type", ""), body)
        if "file" not in form or form["file"].filename is None:
            raise BadRequest("the form has no file", param="file")
        purpose = form["purpose"].content if "purpose" in form else b""
        if purpose != b"batch":
            raise BadRequest(
                "purpose must be batch: files serve nothing else here", param="purpose"
            )
        file = form["file"]
        filename = (file.filename or "").replace("\0", "")[:256]
        return _json(await self.files.add(key_id, filename, file.content))

    async def list_files(self, request: Request) -> Response:
        """A key's files, the newest first."""
        key_id = await self._key_id(request)
        found, more = await self.files.listed(key_id, *_page_of(request))
        first_id, last_id = page_ids(found)
        return _json(FileList(data=found, first_id=first_id, last_id=last_id, has_more=more))

    async def file(self, request: Request) -> Response:
        """One file."""
        key_id = await self._key_id(request)
        return _json(await self.files.get(key_id, request.path_params["file_id"]))

    async def remove(self, request: Request) -> Response:
        """Delete a file."""
        key_id = await self._key_id(request)
        file_id: str = request.path_params["file_id"]
        await self.files.remove(key_id, file_id)
        return _json(DeletedFile(id=file_id))

    async def content(self, request: Request) -> Response:
        """What is in a file."""
        key_id = await self._key_id(request)
        content = await self.files.content(key_id, request.path_params["file_id"])
        return Response(content, media_type="application/octet-stream")

    async def create(self, request: Request) -> Response:
        """Accept a batch."""
        asker = await self.api.asker(request)
        body = await self.api.read(request, BatchRequest, asker.key)
        await self.files.get(asker.key.key_id, body.input_file_id)
        batch = await self.batches.create(asker.key.key_id, body)
        self.runner.wake()
        return _json(batch)

    async def list_batches(self, request: Request) -> Response:
        """A key's batches, the newest first."""
        key_id = await self._key_id(request)
        found, more = await self.batches.listed(key_id, *_page_of(request))
        first_id, last_id = page_ids(found)
        return _json(BatchList(data=found, first_id=first_id, last_id=last_id, has_more=more))

    async def batch(self, request: Request) -> Response:
        """One batch."""
        key_id = await self._key_id(request)
        return _json(await self.batches.get(key_id, request.path_params["batch_id"]))

    async def cancel(self, request: Request) -> Response:
        """Cancel a batch; what was answered of it is kept."""
        key_id = await self._key_id(request)
        batch = await self.batches.cancel(key_id, request.path_params["batch_id"])
        self.runner.wake()
        return _json(batch)

    async def _key_id(self, request: Request) -> str:
        return (await self.api.asker(request)).key.key_id


def _page_of(request: Request) -> tuple[int, str | None]:
    """How many of a list are wanted, and behind which.

    Raises:
        BadRequest: the number is none, or too large.
    """
    given = request.query_params.get("limit", str(DEFAULT_LISTED))
    if not given.isascii() or not given.isdigit() or not 1 <= int(given[:9]) <= MAX_LISTED:
        raise BadRequest(f"limit is a number from 1 to {MAX_LISTED}", param="limit")
    return int(given), request.query_params.get("after")


def _json(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
