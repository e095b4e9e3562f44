"""Files of clients, and batches of requests.

Expands only: the release before this one does not know the tables.
"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "files",
        sa.Column("file_id", sa.Text, nullable=False),
        sa.Column("key_id", sa.Text, nullable=False),
        sa.Column("filename", sa.Text, nullable=False),
        sa.Column("purpose", sa.Text, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("file_id", name="files_pkey"),
        schema="gateway",
    )
    op.create_index("files_created_at_idx", "files", ["created_at"], schema="gateway")
    op.create_index(
        "files_key_id_created_at_idx", "files", ["key_id", "created_at"], schema="gateway"
    )
    op.create_table(
        "batches",
        sa.Column("batch_id", sa.Text, nullable=False),
        sa.Column("key_id", sa.Text, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("begun_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("cancelling_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("total", sa.BigInteger, nullable=False),
        sa.Column("completed", sa.BigInteger, nullable=False),
        sa.Column("failed", sa.BigInteger, nullable=False),
        sa.Column("output_file_id", sa.Text, nullable=True),
        sa.Column("error_file_id", sa.Text, nullable=True),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("leased_until", sa.DateTime(timezone=True), nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.Column("errors", sa.LargeBinary, nullable=True),
        sa.PrimaryKeyConstraint("batch_id", name="batches_pkey"),
        schema="gateway",
    )
    op.create_index("batches_created_at_idx", "batches", ["created_at"], schema="gateway")
    op.create_index(
        "batches_status_leased_until_idx", "batches", ["status", "leased_until"], schema="gateway"
    )
    op.create_index(
        "batches_key_id_created_at_idx", "batches", ["key_id", "created_at"], schema="gateway"
    )
    op.create_table(
        "batch_lines",
        sa.Column("batch_id", sa.Text, nullable=False),
        sa.Column("number", sa.BigInteger, nullable=False),
        sa.Column("succeeded", sa.Boolean, nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("batch_id", "number", name="batch_lines_pkey"),
        schema="gateway",
    )
    op.create_index("batch_lines_at_idx", "batch_lines", ["at"], schema="gateway")
