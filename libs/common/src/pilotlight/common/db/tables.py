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
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
)
from sqlalchemy.dialects.postgresql import JSONB

metadata = MetaData(
    naming_convention={
        "pk": "%(table_name)s_pkey",
        "uq": "%(table_name)s_%(column_0_N_name)s_key",
        "ix": "%(table_name)s_%(column_0_N_name)s_idx",
        "ck": "%(table_name)s_%(constraint_name)s_check",
    }
)

OWNERS = ("gateway", "scheduler", "cache", "materializer")
"""Schemas, and the services that write them."""


def _key(name: str) -> Column[str]:
    return Column(name, Text, primary_key=True)


def _text(name: str, *, null: bool = False) -> Column[str]:
    return Column(name, Text, nullable=null)


def _count(name: str) -> Column[int]:
    return Column(name, BigInteger, nullable=False)


def _time(name: str, *, null: bool = False) -> Column[object]:
    return Column(name, DateTime(timezone=True), nullable=null)


def _seconds(name: str) -> Column[float]:
    return Column(name, Double, nullable=True)


def _json(name: str) -> Column[object]:
    return Column(name, JSONB, nullable=False)


def _row_id() -> Column[int]:
    return Column("id", BigInteger, Identity(always=True), primary_key=True)


def _outbox(owner: str) -> Table:
    return Table(
        "outbox",
        metadata,
        _row_id(),
        Column("event_id", Text, nullable=False, unique=True),
        _text("kind"),
        _text("entity"),
        _time("at"),
        _json("data"),
        _text("trace_parent"),
        schema=owner,
    )


# gateway

models = Table(
    "models",
    metadata,
    _key("name"),
    Column("digest", Text, nullable=False, index=True),
    _json("body"),
    _time("created_at"),
    _time("updated_at"),
    schema="gateway",
)
"""``body`` is a ``Model``."""

organizations = Table(
    "organizations", metadata, _key("name"), _time("created_at"), schema="gateway"
)

projects = Table(
    "projects",
    metadata,
    _key("name"),
    Column(
        "organization",
        Text,
        ForeignKey("gateway.organizations.name", name="projects_organization_fkey"),
        nullable=False,
    ),
    _json("scope"),
    _time("created_at"),
    schema="gateway",
)
"""``name`` is ``organization/project``; ``scope`` is a ``KeyScope``."""

DEFAULT_PROJECT = "default/default"
"""Of keys from files, and of those that name no project. The migrations make it."""

api_keys = Table(
    "api_keys",
    metadata,
    _key("key_id"),
    _text("prefix"),
    Column("hash", Text, nullable=False, unique=True),
    _text("role"),
    _text("label"),
    _time("created_at"),
    _time("revoked_at", null=True),
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
    _time("expires_at", null=True),
    _time("last_used_at", null=True),
    CheckConstraint("role IN ('admin', 'inference')", name="role"),
    CheckConstraint("admin_role IN ('viewer', 'operator', 'owner')", name="admin_role"),
    schema="gateway",
)
"""``hash`` is an HMAC of the key, and what finds its row; ``prefix`` is what people know it by. The
key itself is nowhere. ``scope`` is a ``KeyScope``; ``admin_role`` is of admin keys."""

usage = Table(
    "usage",
    metadata,
    _row_id(),
    Column("at", DateTime(timezone=True), nullable=False, index=True),
    _text("model"),
    _text("key_id"),
    _text("request_id"),
    _count("prompt_tokens"),
    _count("output_tokens"),
    _text("status"),
    schema="gateway",
)

spans = Table(
    "spans",
    metadata,
    _key("trace_id"),
    _key("span_id"),
    _text("parent_id"),
    _text("name"),
    _text("service"),
    Column("start_at", DateTime(timezone=True), nullable=False, index=True),
    _time("end_at"),
    _text("status"),
    _json("attributes"),
    schema="gateway",
)

audit = Table(
    "audit",
    metadata,
    _row_id(),
    Column("at", DateTime(timezone=True), nullable=False, index=True),
    _text("key_id"),
    _text("principal"),
    _text("action"),
    _text("entity"),
    _text("outcome"),
    Column("status", Integer, nullable=False),
    _text("request_id"),
    _text("trace_id"),
    _text("remote"),
    _json("changes"),
    schema="gateway",
)
"""What administrators did and tried. ``outcome`` is ``ok``, a code of the error taxonomy, or
``asked`` while the answer is not known."""

drains = Table(
    "drains",
    metadata,
    _key("node_id"),
    _text("key_id"),
    _time("requested_at"),
    schema="gateway",
)
"""Nodes that an operator wants to be empty; ``requested_at`` is of the database's clock."""

responses = Table(
    "responses",
    metadata,
    _key("response_id"),
    _text("key_id"),
    _text("model"),
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
    _key("file_id"),
    _text("key_id"),
    _text("filename"),
    _text("purpose"),
    _count("bytes"),
    Column("created_at", DateTime(timezone=True), nullable=False, index=True),
    Index("files_key_id_created_at_idx", "key_id", "created_at"),
    schema="gateway",
)
"""Files of clients; their content is an object of the store."""

batches = Table(
    "batches",
    metadata,
    _key("batch_id"),
    _text("key_id"),
    _text("status"),
    Column("created_at", DateTime(timezone=True), nullable=False, index=True),
    _time("expires_at"),
    _time("begun_at", null=True),
    _time("cancelling_at", null=True),
    _time("ended_at", null=True),
    _count("total"),
    _count("completed"),
    _count("failed"),
    _text("output_file_id", null=True),
    _text("error_file_id", null=True),
    _text("owner"),
    _time("leased_until"),
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
    _key("instance_id"),
    Column("model", Text, nullable=False, index=True),
    _text("digest"),
    Column("state", Text, nullable=False, index=True),
    _count("generation"),
    _count("epoch"),
    _json("body"),
    _time("created_at"),
    Column("updated_at", DateTime(timezone=True), nullable=False, index=True),
    schema="scheduler",
)
"""``body`` is an ``Instance``."""

decisions = Table(
    "decisions",
    metadata,
    _key("decision_id"),
    _text("kind"),
    _text("model"),
    _text("instance_id", null=True),
    _count("epoch"),
    Column("at", DateTime(timezone=True), nullable=False, index=True),
    _json("inputs"),
    _json("outcome"),
    _json("reasons"),
    Column("policy_version", Text, nullable=False, server_default=""),
    Column("actual", JSONB, nullable=False, server_default="{}"),
    schema="scheduler",
)
"""``actual``: what came of a start, beside what ``outcome`` predicts; empty until that is known.
``policy_version``: empty of a release that did not say."""

cold_starts = Table(
    "cold_starts",
    metadata,
    _key("instance_id"),
    Column("model", Text, nullable=False, index=True),
    _text("decision_id"),
    _text("trace_id"),
    Column("status", Text, nullable=False),
    _time("demand_seen_at"),
    _seconds("dispatched_s"),
    _seconds("first_token_s"),
    _seconds("wall_offset_s"),
    _seconds("queue_s"),
    _seconds("ttft_s"),
    Column("coverage", Double, nullable=True),
    _json("phases"),
    Column("created_at", DateTime(timezone=True), nullable=False, index=True),
    _time("finished_at", null=True),
    CheckConstraint("status IN ('open', 'done', 'abandoned')", name="status"),
    schema="scheduler",
)

estimates = Table(
    "estimates", metadata, _key("model"), _key("device_kind"), _json("body"), schema="scheduler"
)
"""``body`` is an ``Estimate``."""

timings = Table(
    "timings",
    metadata,
    _key("key"),
    _json("body"),
    Column("updated_at", DateTime(timezone=True), nullable=False, index=True),
    schema="scheduler",
)
"""What starts take, learned from all of them: one row for each term of a model, a device, a link or
a pair of nodes."""

lease = Table(
    "lease",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    _text("holder"),
    _count("epoch"),
    _time("expires_at"),
    CheckConstraint("id = 1", name="one_row"),
    schema="scheduler",
)
"""One row: the leader, its epoch, until when by the database's clock."""

# cache

grants = Table(
    "grants",
    metadata,
    _key("grant_id"),
    _text("instance_id"),
    _text("digest"),
    Column("worker_id", Text, nullable=False, index=True),
    Column("node_id", Text, nullable=False, index=True),
    _count("device_bytes"),
    _count("host_bytes"),
    Column("generation", BigInteger, nullable=False, server_default="0"),
    _time("expires_at"),
    _time("created_at"),
    UniqueConstraint("instance_id", "worker_id"),
    schema="cache",
)

evictions = Table(
    "evictions",
    metadata,
    _row_id(),
    Column("at", DateTime(timezone=True), nullable=False, index=True),
    _text("kind"),
    _text("subject"),
    _text("node_id"),
    _text("reason"),
    _json("inputs"),
    CheckConstraint("kind IN ('instance', 'copy')", name="kind"),
    schema="cache",
)

# materializer

artifacts = Table(
    "artifacts",
    metadata,
    _key("fingerprint"),
    _key("kind"),
    _text("blob_digest"),
    _count("size_bytes"),
    _text("signature"),
    _time("created_at"),
    schema="materializer",
)

outboxes: dict[str, Table] = {owner: _outbox(owner) for owner in OWNERS}
"""Events that wait to be published; a row goes when the stream has confirmed it."""
