"""Settings of the cache."""

from pydantic import Field

from pilotlight.common.db.retention import PruneSettings
from pilotlight.common.settings import DatabaseSettings, ServiceSettings


class CacheSettings(ServiceSettings, DatabaseSettings, PruneSettings):
    """What the cache needs."""

    min_residency_s: float = Field(
        1.0, ge=0, description="A copy younger than this is not evicted."
    )
    evictions_keep_days: float = Field(
        7.0, gt=0, description="Days for which the record of evictions is kept."
    )
    evictions_max_rows: int = Field(
        100_000, ge=0, description="Evictions that are kept at most, the newest; 0: no limit."
    )
