"""Builds of artifacts, their profiles, and when a model's are built.

Expands only: the release before this one does not know the tables and leaves the columns alone.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "models",
        sa.Column("materialize", sa.Text, nullable=False, server_default="manual"),
        schema="gateway",
    )
    for name in ("model_digest", "device_name"):
        op.add_column(
            "artifacts",
            sa.Column(name, sa.Text, nullable=False, server_default=""),
            schema="materializer",
        )
    op.add_column("artifacts", sa.Column("body", JSONB, nullable=True), schema="materializer")
    op.create_table(
        "builds",
        sa.Column("fingerprint", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("model_digest", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("attempt", sa.BigInteger, nullable=False),
        sa.Column("worker_id", sa.Text, nullable=False),
        sa.Column("leased_until", sa.DateTime(timezone=True), nullable=False),
        sa.Column("changed_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("step", sa.Text, nullable=False),
        sa.Column("share", sa.Double, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("blobs", JSONB, nullable=False),
        sa.PrimaryKeyConstraint("fingerprint", name="builds_pkey"),
        schema="materializer",
    )
    op.create_table(
        "wants",
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("asked_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("model", name="wants_pkey"),
        schema="materializer",
    )
    op.create_table(
        "profiles",
        sa.Column("fingerprint", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("device_kind", sa.Text, nullable=False),
        sa.Column("body", JSONB, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("fingerprint", name="profiles_pkey"),
        schema="materializer",
    )


def downgrade() -> None:
    for table in ("profiles", "wants", "builds"):
        op.drop_table(table, schema="materializer")
    for name in ("body", "device_name", "model_digest"):
        op.drop_column("artifacts", name, schema="materializer")
    op.drop_column("models", "materialize", schema="gateway")
