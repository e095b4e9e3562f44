"""Organizations and projects; keys belong to a project, have a scope, a role and an end.

Expands only: the release before this one writes keys without the new columns, whose defaults say
what those keys are: keys of the default project that may do everything.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "organizations",
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("name", name="organizations_pkey"),
        schema="gateway",
    )
    op.create_table(
        "projects",
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("organization", sa.Text, nullable=False),
        sa.Column("scope", JSONB, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("name", name="projects_pkey"),
        sa.ForeignKeyConstraint(
            ["organization"], ["gateway.organizations.name"], name="projects_organization_fkey"
        ),
        schema="gateway",
    )
    op.execute("INSERT INTO gateway.organizations (name, created_at) VALUES ('default', now())")
    op.execute(
        "INSERT INTO gateway.projects (name, organization, scope, created_at)"
        " VALUES ('default/default', 'default', '{}', now())"
    )
    op.add_column(
        "api_keys",
        sa.Column("project", sa.Text, nullable=False, server_default="default/default"),
        schema="gateway",
    )
    op.add_column(
        "api_keys",
        sa.Column("admin_role", sa.Text, nullable=False, server_default="owner"),
        schema="gateway",
    )
    op.add_column(
        "api_keys",
        sa.Column("scope", JSONB, nullable=False, server_default="{}"),
        schema="gateway",
    )
    for column in ("expires_at", "last_used_at"):
        op.add_column(
            "api_keys",
            sa.Column(column, sa.DateTime(timezone=True), nullable=True),
            schema="gateway",
        )
    op.create_foreign_key(
        "api_keys_project_fkey",
        "api_keys",
        "projects",
        ["project"],
        ["name"],
        source_schema="gateway",
        referent_schema="gateway",
    )
    op.create_check_constraint(
        "api_keys_admin_role_check",
        "api_keys",
        "admin_role IN ('viewer', 'operator', 'owner')",
        schema="gateway",
    )
    op.create_index("api_keys_project_idx", "api_keys", ["project"], schema="gateway")
