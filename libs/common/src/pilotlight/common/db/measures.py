"""What a service measures of its database, for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from pilotlight.common.db.outbox import Outbox
from pilotlight.common.db.session import Database, Failure


def measure(database: Database, outbox: Outbox, registry: CollectorRegistry) -> None:
    """Count failures of the database, and tell for how long events have been waiting; once for each
    process.
    """
    errors = Counter(
        "pilotlight_database_errors",
        "Units of work that the database failed, by how.",
        ["kind"],
        registry=registry,
    )
    for kind in Failure:
        errors.labels(kind=kind.value)
    database.on_failure(lambda kind: errors.labels(kind=kind.value).inc())
    lag = Gauge(
        "pilotlight_outbox_lag_seconds",
        "For how long events have been waiting to be published; 0 when none do.",
        registry=registry,
    )
    lag.set_function(lambda: outbox.lag_s)
