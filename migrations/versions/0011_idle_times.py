"""Device-seconds in which models are loaded and idle.

Expands only: the release before this one does not know the table.
"""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "idle_times",
        sa.Column("instance_id", sa.Text, nullable=False),
        sa.Column("worker_id", sa.Text, nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("device_s", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("instance_id", "worker_id", "at", name="idle_times_pkey"),
        schema="gateway",
    )
    op.create_index("idle_times_at_idx", "idle_times", ["at"], schema="gateway")


def downgrade() -> None:
    op.drop_table("idle_times", schema="gateway")
