"""What a tenant may use, and how much of what several want is its."""

from dataclasses import dataclass, field

from pilotlight.policy.fairness import FairShare


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """Limits of a key, or of all keys of a project together. None limits nothing."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Of prompts and outputs."""
    concurrent_requests: int | None = None
    tokens_per_month: int | None = None
    """Of prompts and outputs, in a calendar month in UTC: the budget."""

    @property
    def any(self) -> bool:
        """Something is limited."""
        return not (
            self.requests_per_minute is None
            and self.tokens_per_minute is None
            and self.concurrent_requests is None
            and self.tokens_per_month is None
        )


NO_LIMITS = TenantLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """On whose behalf a request is made."""

    project: str = ""
    """Empty for clients that need no key."""
    weight: float = 1.0
    """The project's: where several wait, it gets as much as the others by weight."""
    project_limits: TenantLimits = NO_LIMITS
    key_limits: TenantLimits = NO_LIMITS
    limited: bool = field(init=False, repr=False, compare=False)
    """Something of it is."""
    share: FairShare = field(init=False, repr=False, compare=False)
    """What it gets where others wait, too."""

    def __post_init__(self) -> None:
        # Each request asks, and a tenant serves very many.
        object.__setattr__(self, "limited", self.key_limits.any or self.project_limits.any)
        object.__setattr__(self, "share", FairShare(self.project, self.weight))


NOBODY = Tenant()
