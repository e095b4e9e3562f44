"""The materializer's tables; ``tables`` has all owners'."""

from sqlalchemy import Column, Double, Table, Text
from sqlalchemy.dialects.postgresql import JSONB

from pilotlight.common.db.columns import count, json, key, metadata, text, time

artifacts = Table(
    "artifacts",
    metadata,
    key("fingerprint"),
    key("kind"),
    text("blob_digest"),
    count("size_bytes"),
    text("signature"),
    time("created_at"),
    Column("model_digest", Text, nullable=False, server_default=""),
    Column("device_name", Text, nullable=False, server_default=""),
    Column("body", JSONB, nullable=True),
    schema="materializer",
)
"""``body`` of an artifact's manifest is its ``Artifact``."""

builds = Table(
    "builds",
    metadata,
    key("fingerprint"),
    text("model"),
    text("model_digest"),
    text("state"),
    count("attempt"),
    text("worker_id"),
    time("leased_until"),
    time("changed_at"),
    text("step"),
    Column("share", Double, nullable=False),
    text("reason"),
    json("blobs"),
    schema="materializer",
)
"""Builds by fingerprint. Leases and ``changed_at`` are of the database's clock. ``blobs`` are the
digests of objects that the build announced before it wrote them."""

wants = Table("wants", metadata, key("model"), time("asked_at"), schema="materializer")
"""Models of which an operator asked for artifacts, and when last, by the database's clock."""

profiles = Table(
    "profiles",
    metadata,
    key("fingerprint"),
    text("model"),
    text("device_kind"),
    json("body"),
    time("created_at"),
    schema="materializer",
)
"""``body`` is a ``Profile``. It outlives nothing: it goes with its artifact."""
