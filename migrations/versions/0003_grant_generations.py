"""Grants: the generation of the stages that each was made for.

Expands only: the release before this one writes rows without it, which have 0: not known.
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "grants",
        sa.Column("generation", sa.BigInteger, nullable=False, server_default="0"),
        schema="cache",
    )
