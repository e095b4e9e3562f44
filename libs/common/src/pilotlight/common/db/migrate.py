"""Bring a database to this release's schema: ``python -m pilotlight.common.db.migrate``.

Runs as the database's owner (PILOTLIGHT_DATABASE_URL), may be run again at any time, and by several
at once. Migrations only ever expand: the release before this one goes on working on the new schema.
"""

import sys
from pathlib import Path

import structlog
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from pydantic import Field
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import OperationalError

from pilotlight.common.db.failures import database_error
from pilotlight.common.db.roles import apply_grants, ensure_roles
from pilotlight.common.errors import NotFound, PilotlightError
from pilotlight.common.settings import DatabaseSettings
from pilotlight.common.shipped import shipped_folder
from pilotlight.common.telemetry import configure_logging

log = structlog.get_logger()

LOCK = 7_016_150_013
"""Key of the advisory lock that one migration at a time holds."""


class MigrateSettings(DatabaseSettings):
    """Settings of the migration; its ``database_url`` names the database's owner."""

    migrations_dir: Path = Field(
        default=shipped_folder("migrations"),
        description="Folder of the migrations. Found by itself in a checkout, and in `share/pilotlight` of an installation's environment.",
    )


def migrate(settings: MigrateSettings) -> None:
    """Make roles, schemas, tables and grants equal to this release.

    Raises:
        DatabaseUnavailable: the database cannot be reached, or refuses its owner.
        NotFound: there are no migrations in the folder.
    """
    if not (settings.migrations_dir / "env.py").is_file():
        raise NotFound(
            f"there are no migrations in {settings.migrations_dir}; set PILOTLIGHT_MIGRATIONS_DIR"
        )
    url = make_url(settings.database_url).set(drivername="postgresql+psycopg")
    engine = create_engine(
        url,
        connect_args={
            "connect_timeout": 10,
            "options": "-c statement_timeout=300s -c lock_timeout=60s",
        },
    )
    try:
        with engine.connect() as connection, connection.begin():
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": LOCK})
            if _is_newer(connection, settings.migrations_dir):
                return
            ensure_roles(connection, settings.secrets_dir)
            config = _config(settings.migrations_dir)
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
            apply_grants(connection)
    except OperationalError as error:
        raise database_error("the database cannot be migrated", error.orig) from error
    finally:
        engine.dispose()


def known_revisions(folder: Path) -> frozenset[str]:
    """The revisions of the schema that this release knows."""
    return frozenset(
        script.revision for script in ScriptDirectory.from_config(_config(folder)).walk_revisions()
    )


def _config(folder: Path) -> Config:
    config = Config()
    config.set_main_option("script_location", str(folder))
    return config


def _is_newer(connection: Connection, folder: Path) -> bool:
    """Whether a newer release has migrated the database.

    It is then left as it is: this release runs on it while it is the last one.
    """
    if (
        connection.execute(text("SELECT to_regclass('public.alembic_version')")).scalar_one()
        is None
    ):
        return False
    revisions = set(
        connection.execute(text("SELECT version_num FROM public.alembic_version")).scalars()
    )
    unknown = revisions - known_revisions(folder)
    if unknown:
        log.warning(
            "the database is a newer release's; nothing is migrated",
            action="migrated_by_newer",
            revisions=sorted(unknown),
            what_to_do="Nothing, if it is the next release's. If it is a later one's: run that release, or restore a backup of this one.",
        )
    return bool(unknown)


def main() -> int:
    """Migrate the database of the environment; the process's exit status."""
    configure_logging("migrate")
    try:
        migrate(MigrateSettings())
    except (PilotlightError, ValueError) as error:
        action = error.action if isinstance(error, PilotlightError) else "Correct the settings."
        log.error("cannot migrate", action="migrate_failed", error=str(error), what_to_do=action)
        return 1
    log.info("the database is up to date", action="migrated")
    return 0


if __name__ == "__main__":
    sys.exit(main())
