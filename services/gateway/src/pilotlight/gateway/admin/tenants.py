"""Routes of the admin API for organizations, projects, keys and usage."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from fastapi import FastAPI, Path, Query, Response

from pilotlight.gateway.admin.gate import By
from pilotlight.gateway.admin.views import OptionalName, Word
from pilotlight.gateway.auth import Authenticator
from pilotlight.gateway.records.usage_report import UsageReader, as_csv
from pilotlight.gateway.tenants.keys import ApiKey, KeyRepository, Minted, key_body
from pilotlight.gateway.tenants.projects import ProjectRepository
from pilotlight.gateway.tenants.schemas import (
    PROJECT,
    KeyLimits,
    Moment,
    NewKey,
    NewOrganization,
    NewProject,
    ProjectChanges,
    ProjectLimits,
    Rotation,
)
from pilotlight.policy.access import Access, AdminRole, KeyScope

Project = Annotated[str, Path(pattern=PROJECT)]
OptionalProject = Annotated[str | None, Query(pattern=PROJECT)]
KeyId = Annotated[str, Path(pattern=r"^key-[0-9a-f]{16}$")]
Since = Annotated[Moment | None, Query(description="RFC 3339; by default 30 days before now.")]
Shape = Annotated[Literal["json", "csv"], Query(alias="format")]
Until = Annotated[Moment | None, Query(description="RFC 3339; by default now.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantParts:
    """What these routes call."""

    authenticator: Authenticator
    keys: KeyRepository
    projects: ProjectRepository
    usage: UsageReader


def add_tenants(app: FastAPI, parts: TenantParts) -> None:
    """Add all of them."""
    _add_projects(app, parts.projects)
    _add_keys(app, parts.authenticator, parts.keys)
    _add_usage(app, parts.usage)


def _add_projects(app: FastAPI, projects: ProjectRepository) -> None:
    @app.get("/organizations")
    async def organizations() -> dict[str, Any]:
        """Every organization."""
        return {"organizations": await projects.organizations()}

    @app.post("/organizations", status_code=201)
    async def make_organization(body: NewOrganization, actor: By) -> dict[str, Any]:
        """Make an organization; its projects have keys."""
        return await projects.add_organization(body.name, actor)

    @app.get("/projects")
    async def listed() -> dict[str, Any]:
        """Every project."""
        return {"projects": await projects.projects()}

    @app.post("/projects", status_code=201)
    async def make_project(body: NewProject, actor: By) -> dict[str, Any]:
        """Make a project, with the models and routes that its keys may reach at most."""
        return await projects.add_project(body.name, _scope(body.models, body.routes), actor)

    @app.patch("/projects/{name:path}")
    async def change(name: Project, body: ProjectChanges, actor: By) -> dict[str, Any]:
        """Say anew which models and routes a project's keys may reach at most."""
        return await projects.change_project(name, _scope(body.models, body.routes), actor)

    @app.put("/projects/{name:path}/limits")
    async def limit(name: Project, body: ProjectLimits, actor: By) -> dict[str, Any]:
        """Say anew how much a project's keys may use together, and its weight."""
        return await projects.limit_project(name, body.limits, body.weight, actor)


def _add_keys(app: FastAPI, authenticator: Authenticator, keys: KeyRepository) -> None:
    @app.get("/keys")
    async def listed(project: OptionalProject = None, revoked: bool = False) -> dict[str, Any]:
        """Keys, the newest first, but for the keys themselves."""
        return {"keys": await keys.shown(project, revoked=revoked)}

    @app.post("/keys", status_code=201)
    async def make(body: NewKey, actor: By) -> dict[str, Any]:
        """Make a key. This answer is the only place where the key itself is shown."""
        body.check()
        minted = authenticator.mint(body.role)
        key = ApiKey(
            key_id=minted.key_id,
            prefix=minted.prefix,
            hash=minted.hash,
            role=body.role,
            label=body.label,
            project=body.project,
            access=Access(key=_scope(body.models, body.routes)),
            admin_role=AdminRole(body.admin_role or AdminRole.VIEWER),
            expires_at=body.expires_at,
        )
        return _made(key, minted, await keys.add(key, actor))

    @app.post("/keys/{key_id}/rotate", status_code=201)
    async def rotate(key_id: KeyId, body: Rotation, actor: By) -> dict[str, Any]:
        """Make a key in the place of another, which ends now or after a while."""
        key, minted, at = await keys.rotate(key_id, authenticator.mint, body.overlap_s, actor)
        return _made(key, minted, at)

    @app.put("/keys/{key_id}/limits")
    async def limit(key_id: KeyId, body: KeyLimits, actor: By) -> dict[str, Any]:
        """Say anew how much an inference key may use."""
        return await keys.limit(key_id, body.limits, actor)

    @app.delete("/keys/{key_id}", status_code=204)
    async def revoke(key_id: KeyId, actor: By) -> None:
        """End a key; every gateway refuses it within a second."""
        await keys.revoke(key_id, actor)


def _add_usage(app: FastAPI, usage: UsageReader) -> None:
    @app.get("/usage")
    async def used(
        since: Since = None,
        until: Until = None,
        project: OptionalProject = None,
        key_id: Word = None,
        model: OptionalName = None,
        shape: Shape = "json",
    ) -> Response:
        """Requests and tokens by day (UTC), key and model, the oldest first."""
        rows = await usage.by_day(since, until, project=project, key_id=key_id, model=model)
        if shape == "csv":
            return Response(as_csv(rows), media_type="text/csv")
        return Response(msgspec.json.encode({"usage": rows}), media_type="application/json")

    @app.get("/usage/models")
    async def used_by_models(
        since: Since = None, until: Until = None, model: OptionalName = None
    ) -> Response:
        """Requests, tokens and device-seconds by model; those with none are left out."""
        rows = await usage.by_model(since, until, model=model)
        return Response(msgspec.json.encode({"models": rows}), media_type="application/json")


def _scope(models: list[str], routes: list[str]) -> KeyScope:
    return KeyScope(models=tuple(models), routes=tuple(routes))


def _made(key: ApiKey, minted: Minted, at: Any) -> dict[str, Any]:
    row = {
        "key_id": key.key_id,
        "prefix": key.prefix,
        "role": key.role,
        "label": key.label,
        "project": key.project,
        "admin_role": key.admin_role.value,
        "scope": msgspec.to_builtins(key.access.key),
        "limits": msgspec.to_builtins(key.tenant.key_limits),
        "created_at": at,
        "expires_at": key.expires_at,
        "last_used_at": None,
        "revoked_at": None,
    }
    return {**key_body(row), "key": minted.plain}
