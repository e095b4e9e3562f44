"""``pilotlight org``, ``project``, ``key`` and ``usage``."""

from datetime import UTC, datetime
from typing import Annotated, Literal

from cyclopts import App, Parameter

from pilotlight.cli.options import Json, admin_client
from pilotlight.common.errors import UnprocessableInput

org_app = App(name="org", help="Organizations, which have projects.")
project_app = App(name="project", help="Projects, which have keys.")
key_app = App(name="key", help="Make API keys, list and end them.")

Models = Annotated[
    tuple[str, ...],
    Parameter(
        help="A model; `name*` stands for all that begin so. May be given several times; without it, all.",
        negative="",
        show_default=False,
    ),
]
Routes = Annotated[
    tuple[str, ...],
    Parameter(
        help="A path with all below it, for example /v1/chat. Likewise.",
        negative="",
        show_default=False,
    ),
]
NOT_LIMITED = Parameter(help="Without it, not limited.", show_default=False)
Key = Annotated[str, Parameter(help="An id that `pilotlight key list` shows.")]


@org_app.command(name="list")
def org_list(*, json: Json = False) -> int:
    """List organizations."""
    from pilotlight.cli import tenants

    with admin_client() as client:
        return tenants.show_organizations(client, as_json=json)


@org_app.command(name="create")
def org_create(
    name: Annotated[str, Parameter(help="Small letters, digits, dots and dashes.")],
    /,
    *,
    json: Json = False,
) -> int:
    """Make an organization."""
    from pilotlight.cli import tenants

    with admin_client() as client:
        return tenants.make_organization(client, name, as_json=json)


@project_app.command(name="list")
def project_list(*, json: Json = False) -> int:
    """List projects, and what their keys may reach at most."""
    from pilotlight.cli import tenants

    with admin_client() as client:
        return tenants.show_projects(client, as_json=json)


@project_app.command(name="create")
def project_create(
    name: Annotated[str, Parameter(help="organization/project.")],
    /,
    *,
    model: Models = (),
    route: Routes = (),
    json: Json = False,
) -> int:
    """Make a project; no key of it reaches beyond these models and routes."""
    from pilotlight.cli import tenants

    body = {"name": name, "models": list(model), "routes": list(route)}
    with admin_client() as client:
        return tenants.make_project(client, body, as_json=json)


@project_app.command(name="set")
def project_set(
    name: Annotated[str, Parameter(help="organization/project.")],
    /,
    *,
    model: Models = (),
    route: Routes = (),
    json: Json = False,
) -> int:
    """Say anew what a project's keys may reach at most; what is left out is not limited."""
    from pilotlight.cli import tenants

    scope = {"models": list(model), "routes": list(route)}
    with admin_client() as client:
        return tenants.change_project(client, name, scope, as_json=json)


@project_app.command(name="limit")
def project_limit(
    name: Annotated[str, Parameter(help="organization/project.")],
    /,
    *,
    requests_per_minute: Annotated[int | None, NOT_LIMITED] = None,
    tokens_per_minute: Annotated[int | None, NOT_LIMITED] = None,
    concurrent_requests: Annotated[int | None, NOT_LIMITED] = None,
    tokens_per_month: Annotated[int | None, NOT_LIMITED] = None,
    weight: Annotated[
        float, Parameter(help="What it gets of what several projects wait for, beside theirs.")
    ] = 1.0,
    json: Json = False,
) -> int:
    """Say anew how much a project's keys may use together; what is left out is not limited."""
    from pilotlight.cli import tenants

    limits = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "concurrent_requests": concurrent_requests,
        "tokens_per_month": tokens_per_month,
    }
    with admin_client() as client:
        return tenants.limit_project(client, name, {**limits, "weight": weight}, as_json=json)


@key_app.command(name="limit")
def key_limit(
    key: Key,
    /,
    *,
    requests_per_minute: Annotated[int | None, NOT_LIMITED] = None,
    tokens_per_minute: Annotated[int | None, NOT_LIMITED] = None,
    concurrent_requests: Annotated[int | None, NOT_LIMITED] = None,
    tokens_per_month: Annotated[int | None, NOT_LIMITED] = None,
    json: Json = False,
) -> int:
    """Say anew how much a key may use; what is left out is not limited."""
    from pilotlight.cli import tenants

    limits = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "concurrent_requests": concurrent_requests,
        "tokens_per_month": tokens_per_month,
    }
    with admin_client() as client:
        return tenants.limit_key(client, key, limits, as_json=json)


@key_app.command(name="list")
def key_list(
    *,
    project: Annotated[str | None, Parameter(help="Only of this project.")] = None,
    revoked: Annotated[
        bool, Parameter(help="Revoked ones, too.", negative="", show_default=False)
    ] = False,
    json: Json = False,
) -> int:
    """List keys, but for the keys themselves, the newest first."""
    from pilotlight.cli import tenants

    with admin_client() as client:
        return tenants.show_keys(client, project, revoked=revoked, as_json=json)


@key_app.command(name="create")
def key_create(
    label: Annotated[str, Parameter(help="What people know it by.")],
    /,
    *,
    project: Annotated[
        str | None, Parameter(help="organization/project; without it, default/default.")
    ] = None,
    model: Models = (),
    route: Routes = (),
    admin: Annotated[
        Literal["viewer", "operator", "owner"] | None,
        Parameter(
            help="Make a key for the admin API: a viewer reads, an operator changes models and nodes, an owner keys, too."
        ),
    ] = None,
    expires: Annotated[
        str | None, Parameter(help="RFC 3339, for example 2027-01-31T12:00:00Z.")
    ] = None,
    json: Json = False,
) -> int:
    """Make a key and show it, this once."""
    from pilotlight.cli import tenants

    body = {
        "label": label,
        "models": list(model),
        "routes": list(route),
        **({"project": project} if project is not None else {}),
        **({"role": "admin", "admin_role": admin} if admin is not None else {}),
        **({"expires_at": _moment("--expires", expires)} if expires is not None else {}),
    }
    with admin_client() as client:
        return tenants.make_key(client, body, as_json=json)


@key_app.command(name="rotate")
def key_rotate(
    key: Key,
    /,
    *,
    overlap_s: Annotated[
        float, Parameter(help="Seconds for which the old key goes on; 0: it ends now.")
    ] = 0.0,
    json: Json = False,
) -> int:
    """Make a key in the place of another, for the same models and routes, and show it."""
    from pilotlight.cli import tenants

    with admin_client() as client:
        return tenants.rotate_key(client, key, overlap_s, as_json=json)


@key_app.command(name="revoke")
def key_revoke(key: Key, /, *, json: Json = False) -> int:
    """End a key; every gateway refuses it within a second."""
    from pilotlight.cli import tenants

    with admin_client() as client:
        return tenants.revoke_key(client, key, as_json=json)


def usage(
    *,
    since: Annotated[
        str | None, Parameter(help="RFC 3339, or a day; by default 30 days ago.")
    ] = None,
    until: Annotated[str | None, Parameter(help="Likewise; by default now.")] = None,
    project: Annotated[str | None, Parameter(help="Only of its keys.")] = None,
    key: Annotated[str | None, Parameter(help="Only of the key with this id.")] = None,
    model: Annotated[str | None, Parameter(help="Only of this model.")] = None,
    by_model: Annotated[
        bool, Parameter(help="One row for each model.", negative="", show_default=False)
    ] = False,
    csv: Annotated[
        bool, Parameter(help="Print CSV instead of text.", negative="", show_default=False)
    ] = False,
    json: Json = False,
) -> int:
    """Show requests, tokens and device-seconds by day, key and model, or by model alone."""
    from pilotlight.cli import tenants

    if csv and json:
        raise UnprocessableInput("--csv and --json exclude each other")
    if by_model and (csv or project or key):
        raise UnprocessableInput(
            "--by-model adds up all keys and has no CSV: leave --csv, --project and --key out"
        )
    given = {
        "since": _moment("--since", since) if since is not None else None,
        "until": _moment("--until", until) if until is not None else None,
        "project": project,
        "key_id": key,
        "model": model,
    }
    wanted = {name: value for name, value in given.items() if value is not None}
    with admin_client() as client:
        if by_model:
            return tenants.show_usage_of_models(client, wanted, as_json=json)
        return tenants.show_usage(client, wanted, as_json=json, as_csv=csv)


def _moment(option: str, text: str) -> str:
    """RFC 3339 of a moment; one without a zone is in UTC."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError as error:
        raise UnprocessableInput(
            f"{option} is {text!r}, and a moment looks like 2027-01-31T12:00:00Z"
        ) from error
    return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).isoformat()
