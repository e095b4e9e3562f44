"""What every route of the admin API answers: schemas for its OpenAPI document, made from the very
types and tables that are shown.

A reply has every field that its schema names: what holds its default is there, too. A contract test
holds all replies of a running gateway against this.
"""

from datetime import datetime
from typing import Any, get_type_hints

import msgspec
from fastapi import FastAPI
from sqlalchemy import Table
from sqlalchemy.dialects.postgresql import JSONB

from pilotlight.common.db import tables
from pilotlight.common.messages.artifacts import Materials
from pilotlight.common.messages.verify import Verification
from pilotlight.gateway.admin.drains import NodeState
from pilotlight.gateway.admin.live import RowsEvent
from pilotlight.gateway.admin.schemas import MODEL_INTERNAL, EvictAccepted, WarmAccepted
from pilotlight.gateway.records.recent import MinuteRow
from pilotlight.gateway.records.usage_report import DayUsage, ModelUsage
from pilotlight.gateway.tenants.schemas import (
    ShownKey,
    ShownLimits,
    ShownOrganization,
    ShownProject,
)
from pilotlight.policy.builds import MaterializePolicy
from pilotlight.policy.cluster import LinkSpeed, NodeFacts, Transfer, WorkerFacts
from pilotlight.policy.ids import NodeId
from pilotlight.policy.model import Model

_REFERENCE = "#/components/schemas/{name}"


def _of(
    name: str,
    described: str,
    /,
    base: type | None = None,
    *,
    nullable: bool = False,
    without: frozenset[str] = frozenset(),
    **more: Any,
) -> type[msgspec.Struct]:
    """A reply with fields of ``base``, and more.

    Args:
        name: of the schema.
        described: what it is.
        base: its fields are shown.
        nullable: those may all be null together.
        without: but for these.
        more: fields beside them, and their types.
    """
    known = (
        {field: kind for field, kind in get_type_hints(base).items() if field not in without}
        if base is not None
        else {}
    )
    fields: dict[str, Any] = {
        field: kind | None if nullable else kind for field, kind in known.items()
    } | more
    return msgspec.defstruct(
        name, list(fields.items()), kw_only=True, namespace={"__doc__": described}
    )


def _row(name: str, described: str, table: Table) -> type[msgspec.Struct]:
    """A row of a table; JSON is shown as it is stored."""

    def kind_of(column: Any) -> Any:
        kind = Any if isinstance(column.type, JSONB) else column.type.python_type
        return kind | None if column.nullable else kind

    return _of(name, described, **{str(column.name): kind_of(column) for column in table.columns})


def _page(name: str, described: str, /, *, before: type = str, **rows: Any) -> type[msgspec.Struct]:
    return _of(name, described, **rows, next_before=before | None)


ShownModel = _of(
    "Model",
    "A registered model.",
    Model,
    without=MODEL_INTERNAL,
    created_at=datetime,
    updated_at=datetime,
    materialize=MaterializePolicy,
)
ShownMaterials = _of("Materials", "Artifacts of a model, and the builds of them.", Materials)
ShownVerification = _of("Verification", "How far a verification is.", Verification)
ShownDevice = _of(
    "NodeDevice",
    "A worker's device, and how it is.",
    worker_id=str,
    kind=str,
    name=str,
    health=str,
    reason=str,
)
ShownLeft = _of("NodeLeft", "What is still on a node.", instances=int, requests=int, copies=int)
ShownDrain = _of(
    "NodeDrain", "Who wants a node to be empty, since when.", requested_at=datetime, key_id=str
)
ShownNode = _of(
    "Node",
    "A node. What its loader reports is null where none does.",
    NodeFacts,
    nullable=True,
    node_id=NodeId,
    state=NodeState,
    workers=int,
    devices=list[ShownDevice],
    left=ShownLeft,
    drain=ShownDrain | None,
)
ShownTransfer = _of(
    "Transfer", "A fetch that is under way.", Transfer, node_id=NodeId, left_s=float | None
)
ShownLink = _of("Link", "What a node's link gave.", LinkSpeed, node_id=NodeId)
ShownInstance = _row("Instance", "An instance.", tables.instances)
ShownColdStart = _row("ColdStart", "A cold start.", tables.cold_starts)
ShownDecision = _row("Decision", "A decision of the scheduler.", tables.decisions)
ShownSpan = _row("Span", "A part of a trace.", tables.spans)
ShownRecord = _row("AuditRecord", "What an administrator did or tried.", tables.audit)
ShownFault = _of(
    "Fault", "What went wrong.", code=str, message=str, param=str | None, what_to_do=str
)

Models = _of("Models", "Every registered model.", models=list[ShownModel])
Nodes = _of("Nodes", "Every node.", nodes=list[ShownNode])
Workers = _of("Workers", "Every worker.", workers=list[WorkerFacts])
Transfers = _of("Transfers", "What moves.", transfers=list[ShownTransfer], links=list[ShownLink])
Instances = _page("Instances", "Instances, the newest first.", instances=list[ShownInstance])
ColdStarts = _page("ColdStarts", "Cold starts, the newest first.", cold_starts=list[ShownColdStart])
Decisions = _page("Decisions", "Decisions, the newest first.", decisions=list[ShownDecision])
Audit = _page("Audit", "The audit log, the newest first.", before=int, audit=list[ShownRecord])
Trace = _of(
    "Trace",
    "One request.",
    trace_id=str,
    spans=list[ShownSpan],
    cold_starts=list[ShownColdStart],
    truncated=bool,
)
ShownEviction = _row("Eviction", "What was evicted, and why.", tables.evictions)
Evictions = _page(
    "Evictions", "Evictions, the newest first.", before=int, evictions=list[ShownEviction]
)
Activity = _of("Activity", "Finished requests by the minute.", minutes=list[MinuteRow])
Found = _of("TraceOfRequest", "The trace of a request.", trace_id=str, request_id=str)
Failure = _of("Error", "Every answer that is not a success.", error=ShownFault)
Warmed = _of("Warmed", "An instance is on its way, or ready.", WarmAccepted)
Evicted = _of("Evicted", "These instances are being released.", EvictAccepted)

Organization = _of("Organization", "An organization.", ShownOrganization)
Organizations = _of("Organizations", "Every organization.", organizations=list[Organization])
LimitsReply = _of("Limits", "Limits; null: not limited.", ShownLimits)
ProjectReply = _of(
    "Project", "A project, and what its keys may reach.", ShownProject, limits=LimitsReply
)
Projects = _of("Projects", "Every project.", projects=list[ProjectReply])
KeyReply = _of("Key", "A key, but for the key itself.", ShownKey, limits=LimitsReply)
Keys = _of("Keys", "Keys, the newest first.", keys=list[KeyReply])
NewKeyReply = _of(
    "MadeKey", "A key that was made, and the key itself.", ShownKey, limits=LimitsReply, key=str
)
UsageRows = _of(
    "Usage", "Requests, tokens and device-seconds by day, key and model.", usage=list[DayUsage]
)
UsageOfModels = _of(
    "UsageOfModels", "Requests, tokens and device-seconds by model.", models=list[ModelUsage]
)

REPLIES: dict[tuple[str, str], type[msgspec.Struct] | None] = {
    ("post", "/models"): ShownModel,
    ("get", "/models"): Models,
    ("get", "/models/{name}"): ShownModel,
    ("patch", "/models/{name}"): ShownModel,
    ("delete", "/models/{name}"): None,
    ("post", "/models/{name}/warm"): Warmed,
    ("post", "/models/{name}/evict"): Evicted,
    ("post", "/models/{name}/verify"): ShownVerification,
    ("post", "/models/{name}/materialize"): ShownMaterials,
    ("get", "/models/{name}/materials"): ShownMaterials,
    ("get", "/verifications/{verification_id}"): ShownVerification,
    ("get", "/nodes"): Nodes,
    ("post", "/nodes/{node_id}/drain"): ShownNode,
    ("delete", "/nodes/{node_id}/drain"): ShownNode,
    ("get", "/transfers"): Transfers,
    ("get", "/workers"): Workers,
    ("get", "/instances"): Instances,
    ("get", "/cold-starts"): ColdStarts,
    ("get", "/decisions"): Decisions,
    ("get", "/traces/{trace_id}"): Trace,
    ("get", "/audit"): Audit,
    ("get", "/cold-starts/{instance_id}"): ShownColdStart,
    ("get", "/decisions/{decision_id}"): ShownDecision,
    ("get", "/activity"): Activity,
    ("get", "/evictions"): Evictions,
    ("get", "/traces"): Found,
    ("get", "/stream"): RowsEvent,
    ("get", "/organizations"): Organizations,
    ("post", "/organizations"): Organization,
    ("get", "/projects"): Projects,
    ("post", "/projects"): ProjectReply,
    ("patch", "/projects/{name}"): ProjectReply,
    ("put", "/projects/{name}/limits"): ProjectReply,
    ("get", "/keys"): Keys,
    ("post", "/keys"): NewKeyReply,
    ("post", "/keys/{key_id}/rotate"): NewKeyReply,
    ("put", "/keys/{key_id}/limits"): KeyReply,
    ("delete", "/keys/{key_id}"): None,
    ("get", "/usage"): UsageRows,
    ("get", "/usage/models"): UsageOfModels,
}
"""What each route answers when it succeeds; None: nothing."""
STREAMS = frozenset({"/stream"})
"""Routes that answer with server-sent events: what is told of them is the data of one event."""


TABLES = frozenset({"/usage"})
"""Routes that answer as CSV, too."""


class DocumentedApp(FastAPI):
    """FastAPI, with the replies above in its document.

    They are not validated when they are sent: some are large.
    """

    def openapi(self) -> dict[str, Any]:
        """The document; made once."""
        if self.openapi_schema is None:
            self.openapi_schema = _with_replies(super().openapi())
        return self.openapi_schema


def _media(path: str) -> str:
    return "text/event-stream" if path in STREAMS else "application/json"


def _with_replies(document: dict[str, Any]) -> dict[str, Any]:
    kinds = [kind for kind in (*REPLIES.values(), Failure) if kind is not None]
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REFERENCE)
    schema_of = dict(zip(kinds, schemas, strict=True))
    for schema in components.values():
        if "properties" in schema:
            schema["required"] = list(schema["properties"])
    # FastAPI's own errors are never sent.
    taken = {
        name: schema
        for name, schema in document["components"]["schemas"].items()
        if "ValidationError" not in name
    }
    # A reply must not take the name of a body: its schema would stand for both. Enumerations may.
    clashing = [name for name in taken.keys() & components if "properties" in taken[name]]
    assert not clashing, clashing
    document["components"]["schemas"] = taken | components

    def body(kind: type[msgspec.Struct], media: str = "application/json") -> dict[str, Any]:
        return {"content": {media: {"schema": schema_of[kind]}}}

    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            status = next(code for code in operation["responses"] if code.startswith("2"))
            kind = REPLIES[method, path]
            done: dict[str, Any] = (
                {"description": "Done."}
                if kind is None
                else {"description": (kind.__doc__ or ""), **body(kind, _media(path))}
            )
            if path in TABLES:
                done["content"]["text/csv"] = {"schema": {"type": "string"}}
            operation["responses"] = {
                status: done,
                "default": {"description": "An error.", **body(Failure)},
            }
    return document
