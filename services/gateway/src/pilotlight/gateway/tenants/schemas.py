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
    StringConstraints,
)

from pilotlight.common.db.tables import DEFAULT_PROJECT
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


Moment = Annotated[AwareDatetime, BeforeValidator(_written)]
"""A time of a query or a body."""
Limit = Annotated[int | None, Field(ge=1, le=10**15)]


class Body(BaseModel):
    """Base of request bodies: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")


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


class NewKey(Body):
    """``POST /admin/v1/keys``."""

    label: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._@/-]{0,99}$", description="What people know it by."
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
