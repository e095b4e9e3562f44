"""Answers of the Responses API, kept for clients that go on from them.

Expands only: the release before this one does not know the table.
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "responses",
        sa.Column("response_id", sa.Text, nullable=False),
        sa.Column("key_id", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("response_id", name="responses_pkey"),
        schema="gateway",
    )
    op.create_index("responses_created_at_idx", "responses", ["created_at"], schema="gateway")
    op.create_index(
        "responses_key_id_created_at_idx", "responses", ["key_id", "created_at"], schema="gateway"
    )
