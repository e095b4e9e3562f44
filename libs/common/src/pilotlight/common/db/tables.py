"""Every table, by owner.

Facts are stored whole in ``body`` (JSON of their dataclass) beside the columns that are queried.

One writer each: a schema is written by the service of its name alone (``roles.py`` has the grants).
Times are of the writer's clock, in UTC; those that gate something (the lease) are of the
database's.
"""

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    Table,
    Text,
    UniqueConstraint,
)
from sqlalchemy.dialects.postgresql import JSONB

from pilotlight.common.db.artifact_tables import artifacts as artifacts
from pilotlight.common.db.artifact_tables import builds as builds
from pilotlight.common.db.artifact_tables import profiles as profiles
from pilotlight.common.db.artifact_tables import wants as wants
from pilotlight.common.db.columns import count, json, key, metadata, row_id, seconds, text, time
from pilotlight.common.db.device_tables import attainment as attainment
from pilotlight.common.db.device_tables import idle_times as idle_times
from pilotlight.common.db.device_tables import start_costs as start_costs
from pilotlight.common.db.device_tables import start_holds as start_holds

OWNERS = ("gateway", "scheduler", "cache", "materializer")
"""Schemas, and the services that write them."""


def _outbox(owner: str) -> Table:
    return Table(
        "outbox",
        metadata,
        row_id(),
        Column("event_id", Text, nullable=False, unique=True),
        text("kind"),
        text("entity"),
        time("at"),
        json("data"),
        text("trace_parent"),
        schema=owner,
    )


# gateway

models = Table(
    "models",
    metadata,
    key("name"),
    Column("digest", Text, nullable=False, index=True),
    json("body"),
    time("created_at"),
    time("updated_at"),
    Column("materialize", Text, nullable=False, server_default="manual"),
    schema="gateway",
)
"""``body`` is a ``Model``; ``materialize`` says when its artifacts are built
(``MaterializePolicy``).
"""

organizations = Table("organizations", metadata, key("name"), time("created_at"), schema="gateway")

projects = Table(
    "projects",
    metadata,
    key("name"),
    Column(
        "organization",
        Text,
        ForeignKey("gateway.organizations.name", name="projects_organization_fkey"),
        nullable=False,
    ),
    json("scope"),
    time("created_at"),
    Column("limits", JSONB, nullable=False, server_default="{}"),
    Column("weight", Double, nullable=False, server_default="1"),
    schema="gateway",
)
"""``name`` is ``organization/project``; ``scope`` is a ``KeyScope``, ``limits`` are
``TenantLimits``."""

DEFAULT_PROJECT = "default/default"
"""Of keys from files, and of those that name no project. The migrations make it."""

api_keys = Table(
    "api_keys",
    metadata,
    key("key_id"),
    text("prefix"),
    Column("hash", Text, nullable=False, unique=True),
    text("role"),
    text("label"),
    time("created_at"),
    Column("revoked_at", DateTime(timezone=True), nullable=True, index=True),
    Column(
        "project",
        Text,
        ForeignKey("gateway.projects.name", name="api_keys_project_fkey"),
        nullable=False,
        server_default=DEFAULT_PROJECT,
        index=True,
    ),
    Column("admin_role", Text, nullable=False, server_default="owner"),
    Column("scope", JSONB, nullable=False, server_default="{}"),
    time("expires_at", null=True),
    time("last_used_at", null=True),
    Column("limits", JSONB, nullable=False, server_default="{}"),
    CheckConstraint("role IN ('admin', 'inference')", name="role"),
    CheckConstraint("admin_role IN ('viewer', 'operator', 'owner')", name="admin_role"),
    schema="gateway",
)
"""``hash`` is an HMAC of the key, and what finds its row; ``prefix`` is what people know it by. The
key itself is nowhere. ``scope`` is a ``KeyScope``, ``limits`` are ``TenantLimits``; ``admin_role``
is of admin keys."""

usage = Table(
    "usage",
    metadata,
    row_id(),
    Column("at", DateTime(timezone=True), nullable=False, index=True),
    text("model"),
    text("key_id"),
    text("request_id"),
    count("prompt_tokens"),
    count("output_tokens"),
    text("status"),
    Column("device_s", Double, nullable=False, server_default="0"),
    Index("usage_key_id_at_idx", "key_id", "at"),
    schema="gateway",
)

spans = Table(
    "spans",
    metadata,
    key("trace_id"),
    key("span_id"),
    text("parent_id"),
    text("name"),
    text("service"),
    Column("start_at", DateTime(timezone=True), nullable=False, index=True),
    time("end_at"),
    text("status"),
    json("attributes"),
    schema="gateway",
)

audit = Table(
    "audit",
    metadata,
    row_id(),
    Column("at", DateTime(timezone=True), nullable=False, index=True),
    text("key_id"),
    text("principal"),
    text("action"),
    text("entity"),
    text("outcome"),
    Column("status", Integer, nullable=False),
    text("request_id"),
    text("trace_id"),
    text("remote"),
    json("changes"),
    schema="gateway",
)
"""What administrators did and tried. ``outcome`` is ``ok``, a code of the error taxonomy, or
``asked`` while the answer is not known."""

drains = Table(
    "drains",
    metadata,
    key("node_id"),
    text("key_id"),
    time("requested_at"),
    schema="gateway",
)
"""Nodes that an operator wants to be empty; ``requested_at`` is of the database's clock."""

responses = Table(
    "responses",
    metadata,
    key("response_id"),
    text("key_id"),
    text("model"),
    Column("created_at", DateTime(timezone=True), nullable=False, index=True),
    Column("body", LargeBinary, nullable=False),
    Index("responses_key_id_created_at_idx", "key_id", "created_at"),
    schema="gateway",
)
"""Answers that clients go on from. ``body`` is JSON in bytes: texts may hold U+0000, which JSONB
does not take."""

files = Table(
    "files",
    metadata,
    key("file_id"),
    text("key_id"),
    text("filename"),
    text("purpose"),
    count("bytes"),
    Column("created_at", DateTime(timezone=True), nullable=False, index=True),
    Index("files_key_id_created_at_idx", "key_id", "created_at"),
    schema="gateway",
)
"""Files of clients; their content is an object of the store."""

batches = Table(
    "batches",
    metadata,
    key("batch_id"),
    text("key_id"),
    text("status"),
    Column("created_at", DateTime(timezone=True), nullable=False, index=True),
    time("expires_at"),
    time("begun_at", null=True),
    time("cancelling_at", null=True),
    time("ended_at", null=True),
    count("total"),
    count("completed"),
    count("failed"),
    text("output_file_id", null=True),
    text("error_file_id", null=True),
    text("owner"),
    time("leased_until"),
    Column("body", LargeBinary, nullable=False),
    Column("errors", LargeBinary, nullable=True),
    Index("batches_status_leased_until_idx", "status", "leased_until"),
    Index("batches_key_id_created_at_idx", "key_id", "created_at"),
    schema="gateway",
)
"""``owner`` is the gateway that works on it, until ``leased_until`` of the database's clock.
``body`` is what the client asked for, ``errors`` what is wrong with its file."""

batch_lines = Table(
    "batch_lines",
    metadata,
    Column("batch_id", Text, primary_key=True),
    Column("number", BigInteger, primary_key=True),
    Column("succeeded", Boolean, nullable=False),
    Column("at", DateTime(timezone=True), nullable=False, index=True),
    Column("body", LargeBinary, nullable=False),
    schema="gateway",
)
"""What became of lines, until their batch has ended: then it is in files."""

# scheduler

instances = Table(
    "instances",
    metadata,
    key("instance_id"),
    Column("model", Text, nullable=False, index=True),
    text("digest"),
    Column("state", Text, nullable=False, index=True),
    count("generation"),
    count("epoch"),
    json("body"),
    time("created_at"),
    Column("updated_at", DateTime(timezone=True), nullable=False, index=True),
    schema="scheduler",
)
"""``body`` is an ``Instance``."""

decisions = Table(
    "decisions",
    metadata,
    key("decision_id"),
    text("kind"),
    text("model"),
    text("instance_id", null=True),
    count("epoch"),
    Column("at", DateTime(timezone=True), nullable=False, index=True),
    json("inputs"),
    json("outcome"),
    json("reasons"),
    Column("policy_version", Text, nullable=False, server_default=""),
    Column("actual", JSONB, nullable=False, server_default="{}"),
    schema="scheduler",
)
"""``actual``: what came of a start, beside what ``outcome`` predicts; empty until that is known.
``policy_version``: empty of a release that did not say."""

cold_starts = Table(
    "cold_starts",
    metadata,
    key("instance_id"),
    Column("model", Text, nullable=False, index=True),
    text("decision_id"),
    text("trace_id"),
    Column("status", Text, nullable=False),
    time("demand_seen_at"),
    seconds("dispatched_s"),
    seconds("first_token_s"),
    seconds("wall_offset_s"),
    seconds("queue_s"),
    seconds("ttft_s"),
    Column("coverage", Double, nullable=True),
    json("phases"),
    Column("created_at", DateTime(timezone=True), nullable=False, index=True),
    time("finished_at", null=True),
    CheckConstraint("status IN ('open', 'done', 'abandoned')", name="status"),
    schema="scheduler",
)

estimates = Table(
    "estimates", metadata, key("model"), key("device_kind"), json("body"), schema="scheduler"
)
"""``body`` is an ``Estimate``."""

timings = Table(
    "timings",
    metadata,
    key("key"),
    json("body"),
    Column("updated_at", DateTime(timezone=True), nullable=False, index=True),
    schema="scheduler",
)
"""What starts take, learned from all of them: one row for each term of a model, a device, a link or
a pair of nodes."""

lease = Table(
    "lease",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    text("holder"),
    count("epoch"),
    time("expires_at"),
    CheckConstraint("id = 1", name="one_row"),
    schema="scheduler",
)
"""One row: the leader, its epoch, until when by the database's clock."""

# cache

grants = Table(
    "grants",
    metadata,
    key("grant_id"),
    text("instance_id"),
    text("digest"),
    Column("worker_id", Text, nullable=False, index=True),
    Column("node_id", Text, nullable=False, index=True),
    count("device_bytes"),
    count("host_bytes"),
    Column("generation", BigInteger, nullable=False, server_default="0"),
    time("expires_at"),
    time("created_at"),
    UniqueConstraint("instance_id", "worker_id"),
    schema="cache",
)

evictions = Table(
    "evictions",
    metadata,
    row_id(),
    Column("at", DateTime(timezone=True), nullable=False, index=True),
    text("kind"),
    text("subject"),
    text("node_id"),
    text("reason"),
    json("inputs"),
    CheckConstraint("kind IN ('instance', 'copy')", name="kind"),
    schema="cache",
)

outboxes: dict[str, Table] = {owner: _outbox(owner) for owner in OWNERS}
"""Events that wait to be published; a row goes when the stream has confirmed it."""
