"""Routes of the admin API for verifications: a node reads all of a model, and says what differs
from what is recorded.
"""

from collections.abc import Awaitable
from typing import Annotated, Any

import msgspec
from blake3 import blake3
from fastapi import FastAPI, Path
from pydantic import BaseModel, ConfigDict, Field

from pilotlight.common.bus import Bus
from pilotlight.common.errors import (
    BusUnavailable,
    ControlPlaneUnavailable,
    DeadlineExceeded,
    NotFound,
)
from pilotlight.common.messages.verify import (
    AskVerification,
    Verification,
    Verify,
    verification_subject,
    verify_subject,
)
from pilotlight.gateway.admin.gate import By
from pilotlight.gateway.admin.nodes import Fleet
from pilotlight.gateway.models.registration import Registration
from pilotlight.gateway.models.schemas import MAX_NAME_CHARS, NAME_PATTERN
from pilotlight.gateway.records.audit import AuditLog
from pilotlight.policy.cluster import Liveness
from pilotlight.policy.ids import ModelName, NodeId

LOADER_DEADLINE_S = 10.0
DEFAULT_DEADLINE_S = 24 * 3600.0
LONGEST_S = 30 * 24 * 3600.0

Name = Annotated[str, Path(pattern=NAME_PATTERN, max_length=MAX_NAME_CHARS)]
VerificationName = Annotated[str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=256)]


class NewVerification(BaseModel):
    """What may be said of a verification."""

    model_config = ConfigDict(extra="forbid")

    deadline_s: float = Field(
        DEFAULT_DEADLINE_S, gt=0, le=LONGEST_S, description="It fails when it takes longer."
    )


def add_verifications(
    app: FastAPI, registration: Registration, fleet: Fleet, bus: Bus, audit: AuditLog
) -> None:
    """Add the routes that start verifications, and ask how far they are.

    Args:
        app: gets the routes.
        registration: knows the models.
        fleet: knows the nodes that could read one.
        bus: to the loader of the node that does.
        audit: records that a verification was asked for.
    """

    @app.post("/models/{name:path}/verify", status_code=202)
    async def verify(name: Name, actor: By, body: NewVerification | None = None) -> dict[str, Any]:
        """Have a node read all of a model, compare it with the recorded digests, and record those
        that are missing.
        """
        model = (await registration.models.get(name)).model
        node_id = _node_for(fleet, model.name)
        deadline_s = (body or NewVerification()).deadline_s  # pyright: ignore[reportCallIssue] - its default is in the field
        async with audit.asked(actor, "model_verify", name) as changes:
            message = Verify(model=model, deadline_s=deadline_s)
            found = await _ask(
                node_id,
                bus.request(
                    verify_subject(node_id), message, Verification, deadline_s=LOADER_DEADLINE_S
                ),
            )
            changes["verification_id"] = found.verification_id
        return _shown(found)

    @app.get("/verifications/{verification_id}")
    async def ask(verification_id: VerificationName) -> dict[str, Any]:
        """How far a verification is, and what differs.

        A node forgets it when its loader starts anew.
        """
        node_id = NodeId(verification_id.rpartition(".")[0])
        if not any(
            node.node_id == node_id and node.liveness is not Liveness.DEAD for node in fleet.nodes()
        ):
            raise NotFound(
                f"no node that reports knows of a verification {verification_id!r}",
                param="verification_id",
            )
        message = AskVerification(verification_id=verification_id)
        answer = bus.request(
            verification_subject(node_id), message, Verification, deadline_s=LOADER_DEADLINE_S
        )
        return _shown(await _ask(node_id, answer))


def _shown(found: Verification) -> dict[str, Any]:
    """All of it: as a message between services it leaves out what holds its default."""
    return msgspec.to_builtins(msgspec.structs.asdict(found))


def _node_for(fleet: Fleet, name: ModelName) -> NodeId:
    """The same node for the same model, whichever gateway is asked, as long as the same nodes
    report.
    """
    alive = [
        node.node_id
        for node in fleet.nodes()
        if node.liveness is Liveness.ALIVE and not node.draining
    ]
    if not alive:
        raise ControlPlaneUnavailable(
            "no node reports that could read the model; see `pilotlight node list`"
        )
    return min(alive, key=lambda node_id: blake3(f"{node_id} {name}".encode()).digest())


async def _ask(node_id: NodeId, answer: Awaitable[Verification]) -> Verification:
    try:
        return await answer
    except (BusUnavailable, DeadlineExceeded) as error:
        raise ControlPlaneUnavailable(f"node {node_id} does not answer: {error.message}") from error
