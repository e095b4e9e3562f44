"""What may be said of organizations, projects and keys."""

import re
from datetime import datetime
from typing import Annotated, Literal

from pydantic import (
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
)

from pilotlight.common.db.tables import DEFAULT_PROJECT
from pilotlight.common.errors import UnprocessableInput
from pilotlight.gateway.tenants.keys import BOOTSTRAP_LABEL
from pilotlight.policy.fairness import MAX_WEIGHT, MIN_WEIGHT
from pilotlight.policy.tenants import TenantLimits

PART = r"[a-z0-9][a-z0-9._-]{0,62}"
ORGANIZATION = rf"^{PART}$"
PROJECT = rf"^{PART}/{PART}$"
MAX_PATTERNS = 100
_MOMENT = re.compile(r"\d{4}-\d{2}-\d{2}[Tt ]")

ModelPattern = Annotated[
    str, StringConstraints(pattern=r"^([A-Za-z0-9._/-]+\*?|\*)$", max_length=128)
]
RoutePath = Annotated[str, StringConstraints(pattern=r"^/[A-Za-z0-9._/-]*$", max_length=128)]
Models = Annotated[
    list[ModelPattern],
    Field(
        max_length=MAX_PATTERNS,
        description="Registered names; one that ends in `*` stands for all that begin so. Empty: all.",
    ),
]
Routes = Annotated[
    list[RoutePath],
    Field(
        max_length=MAX_PATTERNS,
        description="Paths, each with all below it, such as `/v1/chat`. Empty: all.",
    ),
]


def _written(value: object) -> object:
    """Refuses numbers: the document says RFC 3339, and pydantic takes seconds since 1970, too."""
    if not isinstance(value, str) or _MOMENT.match(value) is None:
        raise ValueError("say it as RFC 3339 does, for example 2026-01-31T12:00:00Z")
    return value


Moment = Annotated[AwareDatetime, Field(strict=False), BeforeValidator(_written)]
"""A time of a query or a body."""
Limit = Annotated[int | None, Field(ge=1, le=10**15)]


class Body(BaseModel):
    """Base of request bodies: unknown fields are refused, and so is what is of another type."""

    model_config = ConfigDict(extra="forbid", strict=True)


class NewOrganization(Body):
    """``POST /admin/v1/organizations``."""

    name: str = Field(pattern=ORGANIZATION)


class NewProject(Body):
    """``POST /admin/v1/projects``."""

    name: str = Field(pattern=PROJECT, description="`organization/project`.")
    models: Models = Field(default_factory=list[str])
    routes: Routes = Field(default_factory=list[str])


class ProjectChanges(Body):
    """``PATCH /admin/v1/projects/{name}``: what its keys may do from now on, whole."""

    models: Models = Field(default_factory=list[str])
    routes: Routes = Field(default_factory=list[str])


_KINDS_OF_KEYS: list[JsonValue] = [
    {
        "title": "A key that asks models.",
        "properties": {"role": {"const": "inference"}, "admin_role": {"type": "null"}},
    },
    {
        "title": "A key that administers: of the whole installation.",
        "properties": {
            "role": {"const": "admin"},
            "project": {"const": DEFAULT_PROJECT},
            "models": {"maxItems": 0},
            "routes": {"maxItems": 0},
        },
        "required": ["role"],
    },
]
"""What ``check`` holds a body to, as the document says it."""


class NewKey(Body):
    """``POST /admin/v1/keys``."""

    model_config = ConfigDict(json_schema_extra={"anyOf": _KINDS_OF_KEYS})

    label: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._@/-]{0,99}$",
        description="What people know it by.",
        json_schema_extra={"not": {"const": BOOTSTRAP_LABEL}},
    )
    role: Literal["inference", "admin"] = "inference"
    project: str = Field(DEFAULT_PROJECT, pattern=PROJECT)
    models: Models = Field(default_factory=list[str])
    routes: Routes = Field(default_factory=list[str])
    admin_role: Literal["viewer", "operator", "owner"] | None = Field(
        None, description="Of an admin key: by default `viewer`."
    )
    expires_at: Moment | None = Field(
        None, description="RFC 3339; without it the key works until it is revoked."
    )

    def check(self) -> None:
        """Refuse what does not go together.

        Raises:
            UnprocessableInput: of an admin key a scope, of another one a role of administrators, or
                the label of keys from files.
        """
        if self.label == BOOTSTRAP_LABEL:
            raise UnprocessableInput(f"{BOOTSTRAP_LABEL!r} is the label of keys from files")
        if self.role == "inference" and self.admin_role is not None:
            raise UnprocessableInput("only an admin key has an admin_role")
        if self.role == "admin" and (self.models or self.routes or self.project != DEFAULT_PROJECT):
            raise UnprocessableInput(
                "an admin key is of the whole installation: leave out models, routes and project"
            )


class KeyLimits(Body):
    """``PUT /admin/v1/keys/{key_id}/limits``: how much a key may use from now on, whole."""

    requests_per_minute: Limit = Field(None, description="Absent or null: not limited.")
    tokens_per_minute: Limit = Field(None, description="Of prompts and outputs. Likewise.")
    concurrent_requests: Limit = Field(None, description="Likewise.")
    tokens_per_month: Limit = Field(
        None, description="Of prompts and outputs, in a calendar month in UTC. Likewise."
    )

    @property
    def limits(self) -> TenantLimits:
        """What is said."""
        return TenantLimits(
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
            concurrent_requests=self.concurrent_requests,
            tokens_per_month=self.tokens_per_month,
        )


class ProjectLimits(KeyLimits):
    """``PUT /admin/v1/projects/{name}/limits``: of all its keys together."""

    weight: float = Field(
        1.0,
        ge=MIN_WEIGHT,
        le=MAX_WEIGHT,
        allow_inf_nan=False,
        description="Of what several projects wait for, it gets as much as they by weight.",
    )


class Rotation(Body):
    """``POST /admin/v1/keys/{key_id}/rotate``."""

    overlap_s: float = Field(
        0.0, ge=0, le=31_536_000, allow_inf_nan=False, description="How long the old key goes on."
    )


class ShownOrganization(BaseModel):
    """An organization."""

    name: str
    created_at: datetime


class ShownLimits(BaseModel):
    """Limits; null: not limited."""

    requests_per_minute: int | None
    tokens_per_minute: int | None
    concurrent_requests: int | None
    tokens_per_month: int | None


class ShownProject(BaseModel):
    """A project, and what its keys may do at most."""

    name: str
    organization: str
    models: list[str]
    routes: list[str]
    limits: ShownLimits
    weight: float
    created_at: datetime


class ShownKey(BaseModel):
    """A key, but for the key itself."""

    key_id: str
    prefix: str
    role: str
    label: str
    project: str
    admin_role: str
    models: list[str]
    routes: list[str]
    limits: ShownLimits
    created_at: datetime
    expires_at: datetime | None
    last_used_at: datetime | None
    revoked_at: datetime | None
