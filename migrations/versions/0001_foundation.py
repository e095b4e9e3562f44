"""The foundation: a schema for each owner, with its tables."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

OWNERS = ("gateway", "scheduler", "cache", "materializer")


def upgrade() -> None:
    for owner in OWNERS:
        op.execute(f"CREATE SCHEMA IF NOT EXISTS {owner}")
        _outbox(owner)
    _gateway()
    _scheduler()
    _cache()
    _materializer()


def _text(name: str, *, null: bool = False) -> sa.Column[str]:
    return sa.Column(name, sa.Text, nullable=null)


def _count(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=False)


def _time(name: str, *, null: bool = False) -> sa.Column[object]:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=null)


def _json(name: str) -> sa.Column[object]:
    return sa.Column(name, JSONB, nullable=False)


def _double(name: str) -> sa.Column[float]:
    return sa.Column(name, sa.Double, nullable=True)


def _row_id() -> sa.Column[int]:
    return sa.Column("id", sa.BigInteger, sa.Identity(always=True), nullable=False)


def _key(table: str, *columns: str) -> sa.PrimaryKeyConstraint:
    return sa.PrimaryKeyConstraint(*columns, name=f"{table}_pkey")


def _index(schema: str, table: str, column: str) -> None:
    op.create_index(f"{table}_{column}_idx", table, [column], schema=schema)


def _outbox(owner: str) -> None:
    op.create_table(
        "outbox",
        _row_id(),
        _text("event_id"),
        _text("kind"),
        _text("entity"),
        _time("at"),
        _json("data"),
        _text("trace_parent"),
        _key("outbox", "id"),
        sa.UniqueConstraint("event_id", name="outbox_event_id_key"),
        schema=owner,
    )


def _gateway() -> None:
    op.create_table(
        "models",
        _text("name"),
        _text("digest"),
        _json("body"),
        _time("created_at"),
        _time("updated_at"),
        _key("models", "name"),
        schema="gateway",
    )
    _index("gateway", "models", "digest")
    op.create_table(
        "api_keys",
        _text("key_id"),
        _text("prefix"),
        _text("hash"),
        _text("role"),
        _text("label"),
        _time("created_at"),
        _time("revoked_at", null=True),
        _key("api_keys", "key_id"),
        sa.UniqueConstraint("hash", name="api_keys_hash_key"),
        sa.CheckConstraint("role IN ('admin', 'inference')", name="api_keys_role_check"),
        schema="gateway",
    )
    op.create_table(
        "usage",
        _row_id(),
        _time("at"),
        _text("model"),
        _text("key_id"),
        _text("request_id"),
        _count("prompt_tokens"),
        _count("output_tokens"),
        _text("status"),
        _key("usage", "id"),
        schema="gateway",
    )
    _index("gateway", "usage", "at")
    op.create_table(
        "spans",
        _text("trace_id"),
        _text("span_id"),
        _text("parent_id"),
        _text("name"),
        _text("service"),
        _time("start_at"),
        _time("end_at"),
        _text("status"),
        _json("attributes"),
        _key("spans", "trace_id", "span_id"),
        schema="gateway",
    )
    _index("gateway", "spans", "start_at")


def _scheduler() -> None:
    op.create_table(
        "instances",
        _text("instance_id"),
        _text("model"),
        _text("digest"),
        _text("state"),
        _count("generation"),
        _count("epoch"),
        _json("body"),
        _time("created_at"),
        _time("updated_at"),
        _key("instances", "instance_id"),
        schema="scheduler",
    )
    _index("scheduler", "instances", "model")
    _index("scheduler", "instances", "state")
    op.create_table(
        "decisions",
        _text("decision_id"),
        _text("kind"),
        _text("model"),
        _text("instance_id", null=True),
        _count("epoch"),
        _time("at"),
        _json("inputs"),
        _json("outcome"),
        _json("reasons"),
        _key("decisions", "decision_id"),
        schema="scheduler",
    )
    _index("scheduler", "decisions", "at")
    op.create_table(
        "cold_starts",
        _text("instance_id"),
        _text("model"),
        _text("decision_id"),
        _text("trace_id"),
        _text("status"),
        _time("demand_seen_at"),
        _double("dispatched_s"),
        _double("first_token_s"),
        _double("wall_offset_s"),
        _double("queue_s"),
        _double("ttft_s"),
        _double("coverage"),
        _json("phases"),
        _time("created_at"),
        _time("finished_at", null=True),
        _key("cold_starts", "instance_id"),
        sa.CheckConstraint(
            "status IN ('open', 'done', 'abandoned')", name="cold_starts_status_check"
        ),
        schema="scheduler",
    )
    _index("scheduler", "cold_starts", "model")
    _index("scheduler", "cold_starts", "created_at")
    op.create_table(
        "estimates",
        _text("model"),
        _text("device_kind"),
        _json("body"),
        _key("estimates", "model", "device_kind"),
        schema="scheduler",
    )
    op.create_table(
        "lease",
        sa.Column("id", sa.Integer, nullable=False, autoincrement=False),
        _text("holder"),
        _count("epoch"),
        _time("expires_at"),
        _key("lease", "id"),
        sa.CheckConstraint("id = 1", name="lease_one_row_check"),
        schema="scheduler",
    )


def _cache() -> None:
    op.create_table(
        "grants",
        _text("grant_id"),
        _text("instance_id"),
        _text("worker_id"),
        _text("node_id"),
        _text("digest"),
        _count("device_bytes"),
        _count("host_bytes"),
        _time("expires_at"),
        _time("created_at"),
        _key("grants", "grant_id"),
        sa.UniqueConstraint("instance_id", "worker_id", name="grants_instance_id_worker_id_key"),
        schema="cache",
    )
    _index("cache", "grants", "worker_id")
    _index("cache", "grants", "node_id")
    op.create_table(
        "evictions",
        _row_id(),
        _time("at"),
        _text("kind"),
        _text("subject"),
        _text("node_id"),
        _text("reason"),
        _json("inputs"),
        _key("evictions", "id"),
        sa.CheckConstraint("kind IN ('instance', 'copy')", name="evictions_kind_check"),
        schema="cache",
    )
    _index("cache", "evictions", "at")


def _materializer() -> None:
    op.create_table(
        "artifacts",
        _text("fingerprint"),
        _text("kind"),
        _text("blob_digest"),
        _count("size_bytes"),
        _text("signature"),
        _time("created_at"),
        _key("artifacts", "fingerprint", "kind"),
        schema="materializer",
    )
