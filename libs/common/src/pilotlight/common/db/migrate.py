"""Bring a database to this release's schema: ``python -m pilotlight.common.db.migrate``.

Runs as the database's owner (PILOTLIGHT_DATABASE_URL), may be run again at any time, and by several at once. Migrations only ever
expand: the release before this one goes on working on the new schema.
"""

import sys
from pathlib import Path

import structlog
from alembic import command
from alembic.config import Config
from pydantic import Field
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import OperationalError

from pilotlight.common.db.roles import apply_grants, ensure_roles
from pilotlight.common.errors import DatabaseUnavailable, NotFound, PilotlightError
from pilotlight.common.settings import DatabaseSettings
from pilotlight.common.telemetry import configure_logging

log = structlog.get_logger()

LOCK = 7_016_150_013
"""Key of the advisory lock that one migration at a time holds."""
CHECKOUT_MIGRATIONS = Path(__file__).resolve().parents[6] / "migrations"


class MigrateSettings(DatabaseSettings):
    """Settings of the migration; its ``database_url`` names the database's owner."""

    migrations_dir: Path = Field(
        default=CHECKOUT_MIGRATIONS,
        description="Folder of the migrations. Found by itself in a checkout; images and installations set it.",
    )


def migrate(settings: MigrateSettings) -> None:
    """Make roles, schemas, tables and grants equal to this release.

    Raises:
        DatabaseUnavailable: the database cannot be reached, or refuses its owner.
        NotFound: there are no migrations in the folder.
    """
    if not (settings.migrations_dir / "env.py").is_file():
        raise NotFound(f"there are no migrations in {settings.migrations_dir}; set PILOTLIGHT_MIGRATIONS_DIR")
    url = make_url(settings.database_url).set(drivername="postgresql+psycopg")
    engine = create_engine(url, connect_args={"connect_timeout": 10, "options": "-c statement_timeout=300s -c lock_timeout=60s"})
    try:
        with engine.connect() as connection, connection.begin():
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": LOCK})
            ensure_roles(connection, settings.secrets_dir)
            config = Config()
            config.set_main_option("script_location", str(settings.migrations_dir))
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
            apply_grants(connection)
    except OperationalError as error:
        raise DatabaseUnavailable(f"the database cannot be migrated: {error.orig}") from error
    finally:
        engine.dispose()


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
