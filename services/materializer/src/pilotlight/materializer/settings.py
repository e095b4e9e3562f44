"""Settings of the materializer."""

from pydantic import Field

from pilotlight.common.db.retention import PruneSettings
from pilotlight.common.settings import DatabaseSettings, ServiceSettings


class MaterializerSettings(ServiceSettings, DatabaseSettings, PruneSettings):
    """What the materializer needs: bus, object store, its schema, and the secret
    ``cluster-key``.
    """

    artifact_keep_days: float = Field(
        default=14.0,
        gt=0,
        description="Days for which an artifact is kept that a newer one of the same model and type of device has superseded.",
    )
    artifact_bytes: int = Field(
        default=16 << 30,
        ge=0,
        description="Bytes of all artifacts beyond which superseded ones go before that, the oldest first.",
    )
    artifact_upkeep_interval_s: float = Field(
        default=5.0,
        gt=0,
        description="Seconds between two looks for builds whose worker is silent, and for artifacts that may go.",
    )
