"""Forms with files (RFC 7578), as far as uploads need them."""

import re
from dataclasses import dataclass

from pilotlight.common.errors import BadRequest

MAX_PARTS = 16
MAX_HEAD_BYTES = 4096
_BOUNDARY = re.compile(r'boundary=(?:"([^"]{1,70})"|([^;,\s"]{1,70}))', re.IGNORECASE)
_NAME = re.compile(r'[;\s]name="([^"]{0,256})"', re.IGNORECASE)
_FILENAME = re.compile(r'[;\s]filename="([^"]{0,1024})"', re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Part:
    """One field of a form."""

    content: bytes
    filename: str | None
    """None: it is no file."""


def form_of(content_type: str, body: bytes) -> dict[str, Part]:
    """The fields of a form, by name; of several with one name, the last.

    Raises:
        BadRequest: it is no form, or one of more parts than anybody needs.
    """
    found = _BOUNDARY.search(content_type)
    if not content_type.lower().startswith("multipart/form-data") or found is None:
        raise BadRequest("the body must be multipart/form-data with a boundary, as for an upload")
    boundary = b"--" + (found.group(1) or found.group(2)).encode("latin-1", "replace")
    # A boundary begins a line; the first one may be all that stands before it.
    pieces = (b"\r\n" + body).split(b"\r\n" + boundary, MAX_PARTS + 2)
    if len(pieces) < 3 or not pieces[-1].startswith(b"--"):
        raise BadRequest(f"the form is not closed, or has more than {MAX_PARTS} parts")
    return dict(_part_of(piece) for piece in pieces[1:-1])


def _part_of(piece: bytes) -> tuple[str, Part]:
    head, blank, content = piece.partition(b"\r\n\r\n")
    if not blank or len(head) > MAX_HEAD_BYTES:
        raise BadRequest("a part of the form has no head that ends with an empty line")
    text = head.decode(errors="replace")
    disposition = next(
        (line for line in text.split("\r\n") if line.lower().startswith("content-disposition:")), ""
    )
    name, filename = _NAME.search(disposition), _FILENAME.search(disposition)
    if name is None:
        raise BadRequest("a part of the form has no name")
    return name.group(1), Part(content, filename.group(1) if filename is not None else None)
