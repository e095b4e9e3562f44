"""Pages that show: what each of them reads, and the template that it goes into."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from pilotlight.common.clock import Clock
from pilotlight.common.errors import (
    DatabaseUnavailable,
    ModelNotFound,
    NodeNotFound,
    NotFound,
    TraceNotFound,
)
from pilotlight.gateway.admin.drains import DrainRepository, shown
from pilotlight.gateway.models.registration import Registration
from pilotlight.gateway.models.repository import StoredModel
from pilotlight.gateway.records.audit import AuditFilter, AuditLog
from pilotlight.gateway.records.display import COLD_STARTS, DECISIONS, INSTANCES, Display
from pilotlight.gateway.records.recent import RecentReader
from pilotlight.gateway.records.usage_report import DAYS, UsageReader
from pilotlight.gateway.serving.fleet import Fleet
from pilotlight.gateway.ui.door import MOUNTED_AT
from pilotlight.gateway.ui.templating import Templates
from pilotlight.gateway.ui.waterfall import Interval, lane_of_node, of_cold_start, of_spans
from pilotlight.policy.cluster import Liveness, Tier
from pilotlight.policy.ids import Digest, NodeId
from pilotlight.policy.pooling import Task

EVENTS_PER_PAGE = 50
STARTS_OF_MODEL = 20
INSTANCES_OF_MODEL = 20
MAX_ID_CHARS = 200
LATE_S = 15.0
"""So long after its end a cold start may still get phases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageParts:
    """What pages read."""

    templates: Templates
    clock: Clock
    fleet: Fleet
    registration: Registration
    drains: DrainRepository
    display: Display
    recent: RecentReader
    audit: AuditLog
    usage: UsageReader


class Pages:
    """The handlers of pages and of the parts that they load again."""

    def __init__(self, parts: PageParts) -> None:
        self._parts = parts
        self._render = parts.templates.render

    async def fleet(self, request: Request) -> Response:
        """Nodes, devices and transfers: the lists come by the stream."""
        return self._render(request, "fleet.html")

    async def node(self, request: Request) -> Response:
        """One node."""
        return self._render(request, "node.html", **await self._node_values(request))

    async def node_part(self, request: Request) -> Response:
        """The moving part of a node's page."""
        return self._render(request, "node_part.html", **await self._node_values(request))

    async def models(self, request: Request) -> Response:
        """Every model: the list comes by the stream."""
        return self._render(request, "models.html")

    async def model(self, request: Request) -> Response:
        """One model."""
        values = await self._model_values(request)
        used = await self._parts.usage.by_model(None, None, model=values["model"].name)
        cost = used[0] if used else None
        return self._render(request, "model.html", cost=cost, days=DAYS, **values)

    async def model_part(self, request: Request) -> Response:
        """The moving part of a model's page; it goes on asking when the model is deleted."""
        try:
            values = await self._model_values(request)
        except ModelNotFound:
            return self._render(request, "model_gone.html", model=request.path_params["name"])
        return self._render(request, "model_part.html", **values)

    async def cold_starts(self, request: Request) -> Response:
        """The newest cold starts: the list comes by the stream."""
        return self._render(request, "cold_starts.html")

    async def cold_start(self, request: Request) -> Response:
        """One cold start and its decision."""
        values = await self._start_values(request)
        return self._render(request, "cold_start.html", **values)

    async def cold_start_part(self, request: Request) -> Response:
        """The waterfall alone."""
        return self._render(request, "cold_start_part.html", **await self._start_values(request))

    async def traces(self, request: Request) -> Response:
        """The newest requests, and a search by id."""
        wanted = request.query_params.get("id", "").strip()
        if wanted:
            return await self._search(request, wanted[:MAX_ID_CHARS])
        requests = await self._parts.recent.requests(EVENTS_PER_PAGE)
        return self._render(request, "traces.html", requests=requests, wanted="", failure="")

    async def trace(self, request: Request) -> Response:
        """One trace."""
        trace_id = request.path_params["trace_id"]
        found = await self._parts.display.trace(trace_id)
        if found is None:
            raise TraceNotFound(f"nothing is kept of trace {trace_id[:MAX_ID_CHARS]}")
        trace = _decoded(found)
        return self._render(request, "trace.html", trace=trace, chart=of_spans(trace["spans"]))

    async def events(self, request: Request) -> Response:
        """What administrators did, what was evicted, what was decided."""
        return self._render(request, "events.html", **await self._event_values(request))

    async def events_part(self, request: Request) -> Response:
        """The list alone."""
        return self._render(request, "events_part.html", **await self._event_values(request))

    async def simulations(self, request: Request) -> Response:
        """Results of ``pilotlight simulate``: the browser reads a file, which stays there."""
        return self._render(request, "simulations.html")

    async def playground(self, request: Request) -> Response:
        """Chat with a model: any that is for that."""
        stored = await self._parts.registration.models.all()
        names = [one.model.name for one in stored if one.model.spec.task is Task.GENERATE]
        chosen = request.query_params.get("model", "")
        return self._render(request, "playground.html", names=names, chosen=chosen)

    async def _search(self, request: Request, wanted: str) -> Response:
        trace_id = wanted
        if not (len(wanted) == 32 and all(digit in "0123456789abcdef" for digit in wanted)):
            trace_id = await self._parts.recent.trace_of(wanted) or ""
        if trace_id:
            return RedirectResponse(f"{MOUNTED_AT}/traces/{trace_id}", 303)
        return self._render(
            request,
            "traces.html",
            requests=await self._parts.recent.requests(EVENTS_PER_PAGE),
            wanted=wanted,
            failure="No trace of this id is kept. Spans are kept for a limited time, and not every "
            "request is traced.",
        )

    async def _node_values(self, request: Request) -> dict[str, Any]:
        parts, node_id = self._parts, NodeId(request.path_params["node_id"])
        try:
            intent = await parts.drains.intent()
        except DatabaseUnavailable:
            # What is reported can be shown all the same; what is wanted is not known.
            intent = None
        facts = next((node for node in parts.fleet.nodes() if node.node_id == node_id), None)
        workers = [worker for worker in parts.fleet.workers() if worker.node_id == node_id]
        if facts is None and not workers and (intent is None or node_id not in intent.drains):
            raise NodeNotFound(f"no node {node_id[:MAX_ID_CHARS]!r} reports", param="node_id")
        names = self._names()
        copies = facts.copies if facts is not None else ()
        return {
            "node": shown(node_id, facts, parts.fleet.workers(), intent, {}),
            "facts": facts,
            "workers": sorted(
                (worker for worker in workers if worker.liveness is not Liveness.DEAD),
                key=lambda worker: worker.worker_id,
            ),
            "copies": [
                (copy, names.get(copy.digest, ""))
                for copy in sorted(copies, key=lambda copy: (copy.tier, -copy.size_bytes))
                if copy.tier is not Tier.DEVICE
            ],
            "names": names,
        }

    def _names(self) -> dict[str, str]:
        """Models by digest, of those that this gateway has seen on workers or in transfers."""
        names = {
            str(held.digest): str(held.model)
            for worker in self._parts.fleet.workers()
            for held in worker.held
        }
        for node in self._parts.fleet.nodes():
            names |= {str(one.digest): str(one.model) for one in node.transfers if one.model}
        return names

    async def _model_values(self, request: Request) -> dict[str, Any]:
        parts = self._parts
        stored = await parts.registration.models.get(request.path_params["name"])
        name = stored.model.name
        instances = _decoded(
            await parts.display.page(INSTANCES, model=name, limit=INSTANCES_OF_MODEL)
        )
        starts = _decoded(await parts.display.page(COLD_STARTS, model=name, limit=STARTS_OF_MODEL))
        held = {
            stage.instance_id: stage
            for worker in parts.fleet.workers()
            for stage in worker.held
            if stage.model == name
        }
        return {
            "stored": stored,
            "model": stored.model,
            "size_bytes": sum(stored.model.spec.part_bytes),
            "instances": instances["instances"],
            "held": held,
            "starts": [_with_chart(start) for start in starts["cold_starts"]],
            "within_slo": _within_slo(stored, starts["cold_starts"]),
            "progress": parts.fleet.progress(name, stored.model.digest),
            "failed": parts.fleet.failed_start(name, stored.model.digest),
        }

    async def _start_values(self, request: Request) -> dict[str, Any]:
        instance_id = request.path_params["instance_id"]
        found = await self._parts.display.one(COLD_STARTS, instance_id)
        if found is None:
            raise NotFound(f"no cold start of {instance_id[:MAX_ID_CHARS]} is kept")
        start = _decoded(found)
        found = await self._parts.display.one(DECISIONS, start["decision_id"])
        decision = _decoded(found) if found is not None else None
        placements = _placements(decision)
        seen = [
            one.instance
            for one in self._parts.fleet.instances(start["model"])
            if one.instance.instance_id == instance_id
        ]
        digest = seen[0].digest if seen else None
        going_on = self._going_on(start, digest, placements) if start["status"] == "open" else []
        return {
            "start": start,
            "decision": decision,
            "chart": of_cold_start(start, going_on, placements),
            "instance": seen[0] if seen else None,
            "again": self._again(start),
        }

    def _again(self, start: Mapping[str, Any]) -> str:
        """How often a cold start's page looks again; empty when nothing more will come."""
        if start["status"] == "open":
            return "500ms"
        finished = start["finished_at"]
        if finished is None:
            return ""
        age = self._parts.clock.wall() - datetime.fromisoformat(finished)
        return "2s" if age.total_seconds() < LATE_S else ""

    def _going_on(
        self,
        start: Mapping[str, Any],
        digest: Digest | None,
        placements: Sequence[Mapping[str, Any]],
    ) -> list[Interval]:
        """Fetches of the model that are under way on the nodes of the start: no phase tells of them
        before they end. They are named by the first model that has the digest.
        """
        lanes = {
            node.node_id: lane_of_node(placements, node.node_id) if placements else ""
            for node in self._parts.fleet.nodes()
        }
        now_s = self._parts.clock.wall().timestamp()
        return [
            Interval(
                process="loader",
                name="fetch",
                start_s=now_s - transfer.age_s,
                end_s=now_s,
                detail=f"{transfer.done_bytes * 100 // max(1, transfer.total_bytes)} % so far",
                open=True,
                lane=lane,
            )
            for node in self._parts.fleet.nodes()
            for transfer in node.transfers
            if (transfer.digest == digest or transfer.model == start["model"])
            and (lane := lanes[node.node_id]) is not None
        ]

    async def _event_values(self, request: Request) -> dict[str, Any]:
        parts, query = self._parts, request.query_params
        kind = query.get("kind", "audit")
        before = query.get("before", "")
        limit = EVENTS_PER_PAGE
        older: Any = None
        if kind == "evictions":
            rows = await parts.recent.evictions(limit, _number(before))
            older = rows[-1]["id"] if len(rows) == limit else None
        elif kind == "decisions":
            rows = await parts.recent.decisions(limit, before or None)
            older = rows[-1]["decision_id"] if len(rows) == limit else None
        else:
            kind = "audit"
            rows = await parts.audit.page(AuditFilter(before_id=_number(before)), limit)
            older = rows[-1]["id"] if len(rows) == limit else None
        return {"kind": kind, "rows": rows, "older": older, "first": not before}


def _placements(decision: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Where a decision put what it started."""
    scheme = decision["outcome"].get("scheme") if decision is not None else None
    return scheme["placements"] if scheme else []


def _with_chart(start: dict[str, Any]) -> dict[str, Any]:
    return {**start, "chart": of_cold_start(start)}


def _within_slo(stored: StoredModel, starts: list[dict[str, Any]]) -> float | None:
    """The share of cold starts that had their first token in time; None without any."""
    ended = [start["ttft_s"] for start in starts if start["ttft_s"] is not None]
    if not ended:
        return None
    return sum(1000 * ttft_s <= stored.model.slo.ttft_ms for ttft_s in ended) / len(ended)


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


def _decoded(body: bytes) -> dict[str, Any]:
    return msgspec.json.decode(body, type=dict[str, Any])
