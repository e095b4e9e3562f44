"""Routes without a key: health, readiness, version, and metrics unless a setting closes them."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from pilotlight.gateway.edge.addresses import Network, is_from
from pilotlight.gateway.records import scrape

OPEN_PAGES = frozenset({"/healthz", "/health", "/ping", "/version", "/readyz", "/metrics"})
_VERSION = msgspec.json.encode({"version": version("pilotlight-gateway")})


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """What the open routes tell."""

    metrics: CollectorRegistry
    run_dir: Path
    not_ready: Callable[[], str | None]
    metrics_dir: Path | None = None
    metrics_networks: Sequence[Network] = ()
    """Whose clients may read the metrics; none: all."""

    def routes(self) -> list[Route]:
        """Health, readiness and metrics."""
        return [
            Route("/healthz", self.healthz),
            # Names that clients of other servers ask for.
            Route("/health", self.healthz),
            Route("/ping", self.healthz, methods=["GET", "POST"]),
            Route("/version", self.version),
            Route("/readyz", self.readyz),
            Route("/metrics", self.metrics_page),
        ]

    async def healthz(self, _: Request) -> Response:
        """The event loop turns."""
        return PlainTextResponse("ok\n")

    async def version(self, _: Request) -> Response:
        """Which release this is."""
        return Response(_VERSION, media_type="application/json")

    async def readyz(self, _: Request) -> Response:
        """Requests can be served, or why not."""
        reason = self.not_ready()
        return (
            PlainTextResponse("ready\n")
            if reason is None
            else PlainTextResponse(f"{reason}\n", 503)
        )

    async def metrics_page(self, request: Request) -> Response:
        """Metrics of every service on this machine."""
        if self.metrics_networks and not is_from(self.metrics_networks, request):
            return PlainTextResponse("PILOTLIGHT_METRICS_CLIENTS does not name your address\n", 403)
        page = await scrape.collect(self.metrics, self.run_dir, os.getpid(), self.metrics_dir)
        return Response(page, headers={"content-type": scrape.CONTENT_TYPE})
