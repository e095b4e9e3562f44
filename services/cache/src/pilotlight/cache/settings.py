"""Settings of the cache."""

from pydantic import Field

from pilotlight.common.settings import DatabaseSettings, ServiceSettings


class CacheSettings(ServiceSettings, DatabaseSettings):
    """What the cache needs."""

    min_residency_s: float = Field(1.0, ge=0, description="A copy younger than this is not evicted.")
