"""Limits of keys and projects, and weights of projects.

Expands only: the release before this one writes keys and projects without the new columns, whose
defaults limit nothing.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in ("projects", "api_keys"):
        op.add_column(
            table,
            sa.Column("limits", JSONB, nullable=False, server_default="{}"),
            schema="gateway",
        )
    op.add_column(
        "projects",
        sa.Column("weight", sa.Double, nullable=False, server_default="1"),
        schema="gateway",
    )
    # What a key used in a month, and which keys ended a moment ago, are asked for often.
    op.create_index("usage_key_id_at_idx", "usage", ["key_id", "at"], schema="gateway")
    op.create_index("api_keys_revoked_at_idx", "api_keys", ["revoked_at"], schema="gateway")


def downgrade() -> None:
    op.drop_index("api_keys_revoked_at_idx", "api_keys", schema="gateway")
    op.drop_index("usage_key_id_at_idx", "usage", schema="gateway")
    op.drop_column("projects", "weight", schema="gateway")
    for table in ("projects", "api_keys"):
        op.drop_column(table, "limits", schema="gateway")
