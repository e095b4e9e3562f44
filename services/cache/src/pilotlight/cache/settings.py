"""Settings of the cache."""

from enum import StrEnum

from pydantic import Field

from pilotlight.common.db.retention import PruneSettings
from pilotlight.common.settings import (
    DatabaseSettings,
    EvictionSettings,
    LoadSettings,
    ServiceSettings,
)


class HostCopies(StrEnum):
    """Of which models a copy is kept in some memory while there is room."""

    OFF = "off"
    KEPT = "kept"
    """Those that had one: another is fetched ahead when it is lost."""
    ALL = "all"
    """Every model that is registered."""


class CacheSettings(
    ServiceSettings, DatabaseSettings, EvictionSettings, LoadSettings, PruneSettings
):
    """What the cache needs."""

    host_copies: HostCopies = Field(
        HostCopies.KEPT,
        description="Of which models a copy stays in the memory of some node while there is free room, fetched ahead where it is "
        "missing: `kept` (those that had one), `all` (every registered model) or `off`. "
        "Models whose instances are half full have one more, where their next instance has room on a device.",
    )
    kv_kept_back_share: float = Field(
        0.03,
        ge=0,
        le=1,
        description="Share of a device's memory for models that is not lent to KV beyond what was granted. 1: nothing is lent.",
    )
    evictions_keep_days: float = Field(
        7.0, gt=0, description="Days for which the record of evictions is kept."
    )
    evictions_max_rows: int = Field(
        100_000, ge=0, description="Evictions that are kept at most, the newest; 0: no limit."
    )
