"""Operations: what administrators did, which nodes are to be empty, and an index by which old
instances are found.

Expands only: the release before this one neither reads nor writes what is new here.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column("id", sa.BigInteger, sa.Identity(always=True), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        *(
            sa.Column(name, sa.Text, nullable=False)
            for name in ("key_id", "principal", "action", "entity", "outcome")
        ),
        sa.Column("status", sa.Integer, nullable=False),
        *(
            sa.Column(name, sa.Text, nullable=False)
            for name in ("request_id", "trace_id", "remote")
        ),
        sa.Column("changes", JSONB, nullable=False),
        sa.PrimaryKeyConstraint("id", name="audit_pkey"),
        schema="gateway",
    )
    op.create_index("audit_at_idx", "audit", ["at"], schema="gateway")
    op.create_table(
        "drains",
        sa.Column("node_id", sa.Text, nullable=False),
        sa.Column("key_id", sa.Text, nullable=False),
        sa.Column("requested_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("node_id", name="drains_pkey"),
        schema="gateway",
    )
    op.create_index("instances_updated_at_idx", "instances", ["updated_at"], schema="scheduler")
