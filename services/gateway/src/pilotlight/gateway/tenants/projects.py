"""Organizations and projects: rows of the gateway's schema."""

from datetime import datetime
from typing import Any

from sqlalchemy import insert, select, update
from sqlalchemy.exc import IntegrityError

from pilotlight.common.clock import Clock
from pilotlight.common.db import tables
from pilotlight.common.db.mapping import from_row_json, to_row_json
from pilotlight.common.db.session import Database
from pilotlight.common.errors import AlreadyExists, NotFound
from pilotlight.gateway.records.audit import Actor, record
from pilotlight.policy.access import KeyScope

PROJECT_CHANGED = "project_changed"
"""Event: what the keys of a project may do is other than before."""


class ProjectRepository:
    """Organizations and projects."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def organizations(self) -> list[dict[str, Any]]:
        """Every organization, by name."""
        table = tables.organizations
        async with self._database.reading() as connection:
            rows = (await connection.execute(select(table).order_by(table.c.name))).all()
        return [organization_body(row.name, row.created_at) for row in rows]

    async def add_organization(self, name: str, actor: Actor) -> dict[str, Any]:
        """Make an organization.

        Raises:
            AlreadyExists: the name is taken.
        """
        now = self._clock.wall()
        try:
            async with self._database.unit_of_work() as work:
                await work.connection.execute(
                    insert(tables.organizations).values(name=name, created_at=now)
                )
                await record(work, self._clock, actor, "organization_create", name, {})
        except IntegrityError as error:
            raise AlreadyExists(f"there is an organization {name!r}", param="name") from error
        return organization_body(name, now)

    async def projects(self) -> list[dict[str, Any]]:
        """Every project, by name."""
        table = tables.projects
        async with self._database.reading() as connection:
            rows = (await connection.execute(select(table).order_by(table.c.name))).all()
        return [
            project_body(row.name, from_row_json(row.scope, KeyScope), row.created_at)
            for row in rows
        ]

    async def add_project(self, name: str, scope: KeyScope, actor: Actor) -> dict[str, Any]:
        """Make a project; its name begins with its organization's.

        Raises:
            AlreadyExists: the name is taken.
            NotFound: there is no such organization.
        """
        now = self._clock.wall()
        organization = name.partition("/")[0]
        row = {
            "name": name,
            "organization": organization,
            "scope": to_row_json(scope),
            "created_at": now,
        }
        try:
            async with self._database.unit_of_work() as work:
                await work.connection.execute(insert(tables.projects).values(**row))
                await record(work, self._clock, actor, "project_create", name, to_row_json(scope))
        except IntegrityError as error:
            if "projects_organization_fkey" in str(error.orig):
                raise NotFound(
                    f"there is no organization {organization!r}", param="name"
                ) from error
            raise AlreadyExists(f"there is a project {name!r}", param="name") from error
        return project_body(name, scope, now)

    async def change_project(self, name: str, scope: KeyScope, actor: Actor) -> dict[str, Any]:
        """Say anew what a project's keys may do.

        Raises:
            NotFound: there is no such project.
        """
        table = tables.projects
        changed = (
            update(table)
            .where(table.c.name == name)
            .values(scope=to_row_json(scope))
            .returning(table.c.created_at)
        )
        async with self._database.unit_of_work() as work:
            created_at = (await work.connection.execute(changed)).scalar_one_or_none()
            if created_at is None:
                raise NotFound(f"there is no project {name!r}", param="name")
            work.emit(PROJECT_CHANGED, name)
            await record(work, self._clock, actor, "project_change", name, to_row_json(scope))
        assert isinstance(created_at, datetime)
        return project_body(name, scope, created_at)


def organization_body(name: str, created_at: datetime) -> dict[str, Any]:
    """An organization as the API shows it."""
    return {"name": name, "created_at": created_at.isoformat()}


def project_body(name: str, scope: KeyScope, created_at: datetime) -> dict[str, Any]:
    """A project as the API shows it."""
    return {
        "name": name,
        "organization": name.partition("/")[0],
        "models": list(scope.models),
        "routes": list(scope.routes),
        "created_at": created_at.isoformat(),
    }
