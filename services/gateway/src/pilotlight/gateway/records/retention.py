"""How long the gateway's rows are kept."""

from pilotlight.common.db import tables
from pilotlight.common.db.retention import Keep, keep_outbox
from pilotlight.gateway.records.audit import ASKED, OK
from pilotlight.gateway.schema.batches import ENDED
from pilotlight.gateway.settings import GatewaySettings


def retention(settings: GatewaySettings) -> tuple[Keep, ...]:
    """How long rows of this schema are kept.

    Models, organizations, projects, keys and drains stay until an operator deletes them. Files go
    with their objects (``batches.runner``).
    """
    audit = tables.audit
    refused = audit.c.outcome.not_in((OK, ASKED))
    return (
        Keep(at=tables.usage.c.at, days=settings.usage_keep_days, max_rows=settings.usage_max_rows),
        *(
            Keep(at=of.c.at, days=settings.usage_keep_days)
            for of in (tables.start_costs, tables.start_holds, tables.idle_times, tables.attainment)
        ),
        Keep(at=audit.c.at, days=settings.audit_keep_days, only=~refused),
        # Apart, so that no number of refused attempts drives out what was done.
        Keep(
            at=audit.c.at,
            days=settings.audit_keep_days,
            max_rows=settings.audit_refused_max_rows,
            only=refused,
        ),
        Keep(
            at=tables.spans.c.start_at,
            days=settings.spans_keep_days,
            max_rows=settings.spans_max_rows,
        ),
        Keep(
            at=tables.responses.c.created_at,
            days=settings.responses_keep_days,
            max_rows=settings.responses_max_rows,
        ),
        Keep(
            at=tables.batches.c.created_at,
            days=settings.files_keep_days,
            only=tables.batches.c.status.in_(ENDED),
        ),
        # Their batch has ended long ago, and taken them with it.
        Keep(at=tables.batch_lines.c.at, days=settings.files_keep_days),
        keep_outbox("gateway", settings),
    )
