"""Decisions: which code made them, and what came of them. Timings: what starts take.

Expands only: the release before this one writes decisions without the new columns, and no timings.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "decisions",
        sa.Column("policy_version", sa.Text, nullable=False, server_default=""),
        schema="scheduler",
    )
    op.add_column(
        "decisions",
        sa.Column("actual", JSONB, nullable=False, server_default="{}"),
        schema="scheduler",
    )
    op.create_table(
        "timings",
        sa.Column("key", sa.Text, primary_key=True),
        sa.Column("body", JSONB, nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        schema="scheduler",
    )
    op.create_index("timings_updated_at_idx", "timings", ["updated_at"], schema="scheduler")
