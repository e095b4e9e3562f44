"""How many requests kept their model's SLO, by minute.

Expands only: the release before this one does not know the table.
"""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

COUNTS = ("first_tokens", "first_tokens_met", "answers", "answers_met")


def upgrade() -> None:
    op.create_table(
        "attainment",
        sa.Column("gateway_id", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in COUNTS),
        sa.PrimaryKeyConstraint("gateway_id", "model", "at", name="attainment_pkey"),
        schema="gateway",
    )
    op.create_index("attainment_at_idx", "attainment", ["at"], schema="gateway")


def downgrade() -> None:
    op.drop_table("attainment", schema="gateway")
