"""Device-seconds: of requests, of cold starts, and for whom those were.

Expands only: the release before this one writes usage without the new column, and does not know the
tables.
"""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "usage",
        sa.Column("device_s", sa.Double, nullable=False, server_default="0"),
        schema="gateway",
    )
    op.create_table(
        "start_costs",
        sa.Column("instance_id", sa.Text, nullable=False),
        sa.Column("worker_id", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("device_s", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("instance_id", "worker_id", name="start_costs_pkey"),
        schema="gateway",
    )
    op.create_table(
        "start_holds",
        sa.Column("instance_id", sa.Text, nullable=False),
        sa.Column("gateway_id", sa.Text, nullable=False),
        sa.Column("key_id", sa.Text, nullable=False),
        sa.Column("requests", sa.BigInteger, nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("instance_id", "gateway_id", "key_id", name="start_holds_pkey"),
        schema="gateway",
    )
    for table in ("start_costs", "start_holds"):
        op.create_index(f"{table}_at_idx", table, ["at"], schema="gateway")


def downgrade() -> None:
    for table in ("start_holds", "start_costs"):
        op.drop_table(table, schema="gateway")
    op.drop_column("usage", "device_s", schema="gateway")
