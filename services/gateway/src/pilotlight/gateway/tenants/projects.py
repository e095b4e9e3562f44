"""Organizations and projects: rows of the gateway's schema."""

from datetime import datetime
from typing import Any

from sqlalchemy import Row, Update, insert, select, update
from sqlalchemy.exc import IntegrityError

from pilotlight.common.clock import Clock
from pilotlight.common.db import tables
from pilotlight.common.db.mapping import from_row_json, to_row_json
from pilotlight.common.db.session import Database
from pilotlight.common.errors import AlreadyExists, NotFound
from pilotlight.gateway.records.audit import Actor, record
from pilotlight.policy.access import KeyScope
from pilotlight.policy.tenants import NO_LIMITS, TenantLimits

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
        return [_shown(row) for row in rows]

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
        changed = update(table).where(table.c.name == name).values(scope=to_row_json(scope))
        return await self._change(name, changed, actor, "project_change", to_row_json(scope))

    async def limit_project(
        self, name: str, limits: TenantLimits, weight: float, actor: Actor
    ) -> dict[str, Any]:
        """Say anew how much a project's keys may use together, and its weight.

        Args:
            name: the project's.
            limits: of all its keys together; what is None is not limited.
            weight: what it gets of what several projects wait for, compared with theirs.
            actor: who asks.

        Raises:
            NotFound: there is no such project.
        """
        said = to_row_json(limits)
        table = tables.projects
        changed = update(table).where(table.c.name == name).values(limits=said, weight=weight)
        return await self._change(name, changed, actor, "project_limit", {**said, "weight": weight})

    async def _change(
        self, name: str, changed: Update, actor: Actor, action: str, said: Any
    ) -> dict[str, Any]:
        async with self._database.unit_of_work() as work:
            row = (
                await work.connection.execute(changed.returning(*tables.projects.c))
            ).one_or_none()
            if row is None:
                raise NotFound(f"there is no project {name!r}", param="name")
            work.emit(PROJECT_CHANGED, name)
            await record(work, self._clock, actor, action, name, said)
        return _shown(row)


def _shown(row: Row[Any]) -> dict[str, Any]:
    return project_body(
        row.name,
        from_row_json(row.scope, KeyScope),
        row.created_at,
        from_row_json(row.limits, TenantLimits),
        row.weight,
    )


def organization_body(name: str, created_at: datetime) -> dict[str, Any]:
    """An organization as the API shows it."""
    return {"name": name, "created_at": created_at.isoformat()}


def project_body(
    name: str,
    scope: KeyScope,
    created_at: datetime,
    limits: TenantLimits = NO_LIMITS,
    weight: float = 1.0,
) -> dict[str, Any]:
    """A project as the API shows it.

    Args:
        name: its name.
        scope: what its keys may reach at most.
        created_at: when it was made.
        limits: of all its keys together.
        weight: what it gets where several wait.
    """
    return {
        "name": name,
        "organization": name.partition("/")[0],
        "models": list(scope.models),
        "routes": list(scope.routes),
        "limits": to_row_json(limits),
        "weight": weight,
        "created_at": created_at.isoformat(),
    }
