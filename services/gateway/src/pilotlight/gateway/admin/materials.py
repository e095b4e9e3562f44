"""Routes of the admin API for materialized state: a model's artifacts, and the builds of them."""

from collections.abc import Awaitable
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Path

from pilotlight.common.bus import Bus
from pilotlight.common.errors import BusUnavailable, ControlPlaneUnavailable, DeadlineExceeded
from pilotlight.common.messages.artifacts import (
    ASK_MATERIALS_SUBJECT,
    MATERIALIZE_SUBJECT,
    AskMaterials,
    Materialize,
    Materials,
)
from pilotlight.gateway.admin.gate import By
from pilotlight.gateway.models.registration import Registration
from pilotlight.gateway.models.schemas import MAX_NAME_CHARS, NAME_PATTERN
from pilotlight.gateway.records.audit import AuditLog
from pilotlight.policy.ids import ModelName

MATERIALIZER_DEADLINE_S = 10.0

Name = Annotated[str, Path(pattern=NAME_PATTERN, max_length=MAX_NAME_CHARS)]


def add_materials(app: FastAPI, registration: Registration, bus: Bus, audit: AuditLog) -> None:
    """Add the routes that ask for artifacts, and show what there is.

    Args:
        app: gets the routes.
        registration: knows the models.
        bus: to the materializer.
        audit: records that artifacts were asked for.
    """

    @app.post("/models/{name:path}/materialize", status_code=202)
    async def materialize(name: Name, actor: By) -> dict[str, Any]:
        """Have a worker with time build the model's artifact, where it has none for its
        environment.
        """
        await registration.models.get(name)
        message = Materialize(model=ModelName(name))
        async with audit.asked(actor, "model_materialize", name):
            answer = bus.request(
                MATERIALIZE_SUBJECT, message, Materials, deadline_s=MATERIALIZER_DEADLINE_S
            )
            return _shown(await _ask(answer))

    @app.get("/models/{name:path}/materials")
    async def materials(name: Name) -> dict[str, Any]:
        """A model's artifacts, and the builds of them."""
        await registration.models.get(name)
        answer = bus.request(
            ASK_MATERIALS_SUBJECT,
            AskMaterials(model=ModelName(name)),
            Materials,
            deadline_s=MATERIALIZER_DEADLINE_S,
        )
        return _shown(await _ask(answer))


def _shown(found: Materials) -> dict[str, Any]:
    """All of it: as a message between services it leaves out what holds its default."""
    body = msgspec.structs.asdict(found)
    for name in ("builds", "artifacts"):
        body[name] = [msgspec.structs.asdict(one) for one in body[name]]
    return msgspec.to_builtins(body)


async def _ask(answer: Awaitable[Materials]) -> Materials:
    try:
        return await answer
    except (BusUnavailable, DeadlineExceeded) as error:
        raise ControlPlaneUnavailable(
            f"the materializer does not answer: {error.message}"
        ) from error
