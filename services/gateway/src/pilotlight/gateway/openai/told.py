"""What headers of requests ask for, and what headers of answers tell beside them."""

from collections.abc import Mapping

import msgspec
from starlette.types import Scope

from pilotlight.common.errors import BadRequest
from pilotlight.gateway.edge.client_headers import note_header
from pilotlight.gateway.models.catalog import CatalogEntry
from pilotlight.gateway.openai.prompt import INLINE_BYTES
from pilotlight.gateway.schema.ignored import ignored_fields
from pilotlight.gateway.schema.replies import ModelCard
from pilotlight.gateway.serving.starts import ColdStart, ModelState, Readiness

COLD_START = "x-pilotlight-cold-start"
EXPECTED_S = "x-pilotlight-expected-s"
IGNORED_FIELDS = "x-pilotlight-ignored-fields"


def cold_start_of(headers: Mapping[str, str]) -> ColdStart:
    """What a request says of cold starts.

    Raises:
        BadRequest: it says something else.
    """
    asked = headers.get(COLD_START)
    if asked is None:
        return ColdStart.ALLOW
    try:
        return ColdStart(asked.strip().lower())
    except ValueError as error:
        values = ", ".join(ColdStart)
        raise BadRequest(
            f"{COLD_START} is one of {values}, not {asked[:64]!r}", param=COLD_START
        ) from error


def tell_readiness(scope: Scope, readiness: Readiness) -> None:
    """Say in the answer's headers whether the model was cold when the request came."""
    ready = readiness.state is ModelState.READY
    note_header(scope, COLD_START, "false" if ready else "true")
    if not ready and readiness.expected_s is not None:
        note_header(scope, EXPECTED_S, f"{readiness.expected_s:.1f}")


def tell_ignored(scope: Scope, body: bytes, as_type: type[msgspec.Struct]) -> None:
    """Name the fields of a decoded body that nothing was done with.

    Large bodies, which are not decoded in this process, are not looked through.
    """
    if len(body) <= INLINE_BYTES and (names := ignored_fields(body, as_type)):
        note_header(scope, IGNORED_FIELDS, ", ".join(names))


def model_card(name: str, entry: CatalogEntry, readiness: Readiness) -> ModelCard:
    """What clients see of a model under one of its names."""
    return ModelCard(
        id=name,
        root=entry.model.name,
        created=entry.created_unix_s,
        task=entry.model.spec.task.value,
        max_model_len=entry.model.spec.max_context_tokens,
        state=readiness.state.value,
        expected_s=readiness.expected_s,
    )
