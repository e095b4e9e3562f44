"""What a key may be used for: models and routes by scope, the admin API by role."""

from dataclasses import dataclass
from enum import StrEnum

ANY_SUFFIX = "*"


class AdminRole(StrEnum):
    """What an admin key may do. Each role may do what the ones before it may."""

    VIEWER = "viewer"
    """Read everything."""
    OPERATOR = "operator"
    """Change models and nodes."""
    OWNER = "owner"
    """Change organizations, projects and keys."""


class AdminNeed(StrEnum):
    """What a request to the admin API takes."""

    READ = "read"
    OPERATE = "operate"
    OWN = "own"


_MAY = {
    AdminRole.VIEWER: frozenset({AdminNeed.READ}),
    AdminRole.OPERATOR: frozenset({AdminNeed.READ, AdminNeed.OPERATE}),
    AdminRole.OWNER: frozenset(AdminNeed),
}


def may_administer(role: AdminRole, need: AdminNeed) -> bool:
    """Whether a role is enough."""
    return need in _MAY[role]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyScope:
    """Models and routes that a key is for. What is empty limits nothing."""

    models: tuple[str, ...] = ()
    """Registered names; one that ends in ``*`` stands for all that begin so."""
    routes: tuple[str, ...] = ()
    """Paths, each with all below it."""

    def allows_model(self, name: str) -> bool:
        """Whether requests may use this model, or see that it is there."""
        return not self.models or any(_matches(pattern, name) for pattern in self.models)

    def allows_route(self, path: str) -> bool:
        """Whether requests may go there."""
        return not self.routes or any(
            path == route or path.startswith(f"{route.rstrip('/')}/") for route in self.routes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """A key's scope within its project's: a request needs both."""

    project: KeyScope = KeyScope()
    key: KeyScope = KeyScope()

    def allows_model(self, name: str) -> bool:
        """As ``KeyScope.allows_model``, of both."""
        if not self.project.models and not self.key.models:
            return True
        return self.project.allows_model(name) and self.key.allows_model(name)

    def allows_route(self, path: str) -> bool:
        """As ``KeyScope.allows_route``, of both."""
        if not self.project.routes and not self.key.routes:
            return True
        return self.project.allows_route(path) and self.key.allows_route(path)


UNLIMITED = Access()


def _matches(pattern: str, name: str) -> bool:
    if pattern.endswith(ANY_SUFFIX):
        return name.startswith(pattern.removesuffix(ANY_SUFFIX))
    return name == pattern
