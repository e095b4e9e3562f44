"""Rights in the database: one role for each owner, which writes its own schema and reads elsewhere
only what is listed.

Roles and grants are made equal to this page by every migration: what is not listed is revoked.
"""

from pathlib import Path

import structlog
from sqlalchemy import Connection, Table, text

from pilotlight.common.db import tables
from pilotlight.common.db.columns import metadata
from pilotlight.common.secret_files import read_secret

log = structlog.get_logger()


def _tables_of(*owners: str) -> tuple[Table, ...]:
    return tuple(table for table in metadata.sorted_tables if table.schema in owners)


READS: dict[str, tuple[Table, ...]] = {
    "gateway": _tables_of("scheduler", "cache", "materializer"),
    "scheduler": (tables.models, tables.drains, tables.profiles, tables.grants),
    "cache": (tables.models, tables.drains, tables.instances, tables.lease, tables.estimates),
    "materializer": (tables.models,),
}
"""What each owner may read outside its own schema."""


def role_of(owner: str) -> str:
    """The database role of a service."""
    return f"pilotlight_{owner}"


def ensure_roles(connection: Connection, secrets_dir: Path | None) -> None:
    """Make every role that does not exist, and give it the password of its secret (stored as a
    SCRAM verifier).
    """
    for owner in tables.OWNERS:
        role = role_of(owner)
        # Another database of the same cluster may be migrated at the same moment, and roles belong
        # to the cluster.
        connection.execute(
            text(
                f"DO $$ BEGIN CREATE ROLE {role} LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE; "
                "EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL; END $$"
            )
        )
        password = read_secret(secrets_dir, f"postgres-{owner}")
        if password is None:
            log.warning(
                "role keeps its password: there is no secret for it",
                action="role_without_secret",
                role=role,
            )
            continue
        driver = connection.connection.driver_connection
        if driver is None:
            raise ConnectionError("the connection to the database is closed")
        verifier = driver.pgconn.encrypt_password(
            password.encode(), role.encode(), b"scram-sha-256"
        ).decode()
        connection.exec_driver_sql(f"ALTER ROLE {role} PASSWORD '{verifier}'")


def apply_grants(connection: Connection) -> None:
    """Make privileges equal to ``READS`` and ownership, and nothing beyond."""
    database = connection.execute(text("SELECT quote_ident(current_database())")).scalar_one()
    everyone = ", ".join(role_of(owner) for owner in tables.OWNERS)
    statements = [
        f"REVOKE ALL ON DATABASE {database} FROM PUBLIC",
        "REVOKE ALL ON SCHEMA public FROM PUBLIC",
        f"GRANT CONNECT ON DATABASE {database} TO {everyone}",
    ]
    for schema in tables.OWNERS:
        statements += [
            f"REVOKE ALL ON ALL TABLES IN SCHEMA {schema} FROM PUBLIC, {everyone}",
            f"REVOKE ALL ON SCHEMA {schema} FROM PUBLIC, {everyone}",
            f"GRANT USAGE ON SCHEMA {schema} TO {role_of(schema)}",
            f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO {role_of(schema)}",
        ]
    for owner, readable in READS.items():
        schemas = sorted({str(table.schema) for table in readable})
        statements += [f"GRANT USAGE ON SCHEMA {schema} TO {role_of(owner)}" for schema in schemas]
        statements += [
            f"GRANT SELECT ON {table.fullname} TO {role_of(owner)}" for table in readable
        ]
    for statement in statements:
        connection.exec_driver_sql(statement)
