"""What the gateway counts of HTTP, for Prometheus."""

from prometheus_client import CollectorRegistry, Gauge

from pilotlight.common.tallies import Tally
from pilotlight.gateway.edge.bodies import BodyBudget

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class HttpMeasures:
    """Counters of everything that is answered over HTTP, whatever became of it."""

    def __init__(self, registry: CollectorRegistry, bodies: BodyBudget) -> None:
        self._answers = Tally(
            "pilotlight_http_answers",
            "Answers over HTTP, by route, status (499: the client left before its end) and code of the error, if any.",
            ["route", "method", "status", "code"],
            registry,
        )
        held = Gauge(
            "pilotlight_body_bytes",
            "Memory that is held for bodies of requests.",
            registry=registry,
        )
        held.set_function(lambda: float(bodies.held_bytes))

    def answered(self, route: str, method: str, status: int, code: str) -> None:
        """Count an answer. Every label has a bounded number of values.

        Args:
            route: the template of the route.
            method: the request's; one that no route has counts as ``other``.
            status: of HTTP.
            code: the error's, of the taxonomy; empty: none.
        """
        method = method if method in _METHODS else "other"
        self._answers.add(route, method, str(status), code)
